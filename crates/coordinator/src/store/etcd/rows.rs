//! Rows of the tables as keys and values of etcd.
//!
//! Triggers record the table and the primary key of every row that a change touches. The new row,
//! or its absence, is read from the table afterwards.

use std::collections::BTreeMap;

use rusqlite::types::{Value, ValueRef};
use rusqlite::{Connection, OptionalExtension as _, ToSql, params_from_iter};
use serde_json::{Map, Value as Json};

use crate::store::StoreError;

/// Tables that all coordinators share. The others are local.
const SHARED: [&str; 9] = [
    "mesh", "policy", "relay", "token", "member", "removed", "former", "freed", "audit",
];
/// The one AUTOINCREMENT counter that is shared: the highest row of its table may have been
/// deleted, and a new replica would reuse its id. The highest rows of the other tables are never
/// deleted.
const COUNTED_TABLE: &str = "member";
/// SQLite's table of counters.
const COUNTER_TABLE: &str = "sqlite_sequence";

/// Rows by `TABLE/KEY`; `None`: deleted.
pub(super) type Rows = BTreeMap<String, Option<Vec<u8>>>;

/// The shared tables of a database.
pub(super) struct Tables(Vec<Table>);

struct Table {
    name: String,
    columns: Vec<Column>,
    /// Index of the primary key in `columns`.
    key: usize,
    select: String,
    insert: String,
    delete: String,
}

struct Column {
    name: String,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Integer,
    Text,
    /// Hexadecimal digits in JSON.
    Blob,
}

impl Tables {
    /// Reads the schema, and creates the triggers.
    pub fn of(connection: &Connection) -> Result<Tables, StoreError> {
        let mut tables = Vec::new();
        connection.execute_batch("CREATE TEMP TABLE touched (name TEXT, key ANY) STRICT")?;
        for name in SHARED {
            let table = Table::of(connection, name)?;
            let key = &table.columns[table.key].name;
            for (event, row) in [("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")] {
                connection.execute_batch(&format!(
                    "CREATE TEMP TRIGGER {name}_{event} AFTER {event} ON main.{name}
                     BEGIN INSERT INTO touched VALUES ('{name}', {row}.{key}); END"
                ))?;
            }
            tables.push(table);
        }
        // The delete trigger also fires for a row that REPLACE deletes.
        connection.pragma_update(None, "recursive_triggers", true)?;
        let column = |name: &str, kind| Column {
            name: name.to_owned(),
            kind,
        };
        let columns = vec![column("name", Kind::Text), column("seq", Kind::Integer)];
        tables.push(Table::new(COUNTER_TABLE, columns, 0));
        Ok(Tables(tables))
    }

    /// Returns all rows.
    pub fn all(&self, connection: &Connection) -> Result<Rows, StoreError> {
        let mut rows = Rows::new();
        for table in self.0.iter().filter(|table| table.name != COUNTER_TABLE) {
            let sql = format!(
                "SELECT {} FROM {}",
                table.columns[table.key].name, table.name
            );
            let mut statement = connection.prepare(&sql)?;
            let keys = statement.query_map([], |row| row.get::<_, Value>(0))?;
            for key in keys {
                table.read_row(connection, &key?, &mut rows)?;
            }
        }
        if self.counter(connection)?.is_some() {
            let counters = self.0.iter().filter(|table| table.name == COUNTER_TABLE);
            for table in counters {
                table.read_row(
                    connection,
                    &Value::Text(COUNTED_TABLE.to_owned()),
                    &mut rows,
                )?;
            }
        }
        Ok(rows)
    }

    /// Clears the record of touched rows.
    pub fn forget(&self, connection: &Connection) -> Result<(), StoreError> {
        connection
            .prepare_cached("DELETE FROM temp.touched")?
            .execute([])?;
        Ok(())
    }

    /// Returns the counter, for [`Self::touched`].
    pub fn counter(&self, connection: &Connection) -> Result<Option<i64>, StoreError> {
        let mut statement =
            connection.prepare_cached("SELECT seq FROM sqlite_sequence WHERE name = ?1")?;
        Ok(statement
            .query_row([COUNTED_TABLE], |row| row.get(0))
            .optional()?)
    }

    /// Returns the number of rows touched since the last [`Self::forget`], plus one for the
    /// counter.
    pub fn count_touched(&self, connection: &Connection) -> Result<usize, StoreError> {
        let sql = "SELECT count(*) FROM (SELECT DISTINCT name, key FROM temp.touched)";
        let count: u32 = connection
            .prepare_cached(sql)?
            .query_row([], |row| row.get(0))?;
        Ok(count as usize + 1)
    }

    /// Returns the rows touched since the last [`Self::forget`] as they are now.
    pub fn touched(
        &self,
        connection: &Connection,
        counter: Option<i64>,
    ) -> Result<Rows, StoreError> {
        let mut rows = Rows::new();
        for table in &self.0 {
            if table.name == COUNTER_TABLE {
                if self.counter(connection)? != counter {
                    table.read_row(
                        connection,
                        &Value::Text(COUNTED_TABLE.to_owned()),
                        &mut rows,
                    )?;
                }
                continue;
            }
            let mut statement = connection
                .prepare_cached("SELECT DISTINCT key FROM temp.touched WHERE name = ?1")?;
            let keys = statement.query_map([&table.name], |row| row.get::<_, Value>(0))?;
            for key in keys {
                table.read_row(connection, &key?, &mut rows)?;
            }
        }
        Ok(rows)
    }

    /// Replaces rows within a transaction. Deletes first, so that a value of a unique column can
    /// move from one row to another.
    pub fn put(&self, connection: &Connection, rows: &Rows) -> Result<(), StoreError> {
        connection.pragma_update(None, "defer_foreign_keys", true)?;
        for key in rows.keys() {
            let (table, key_value) = self.find(key)?;
            connection
                .prepare_cached(&table.delete)?
                .execute([key_value])?;
        }
        for (key, row) in rows {
            if let Some(row) = row {
                let (table, key_value) = self.find(key)?;
                let values = table.values(row, &key_value).ok_or_else(|| corrupt(key))?;
                if table.name == COUNTER_TABLE {
                    // Inserting rows has created the counter.
                    let mut again = connection.prepare_cached(&table.delete)?;
                    again.execute([&key_value])?;
                }
                connection
                    .prepare_cached(&table.insert)?
                    .execute(params_from_iter(&values))
                    .map_err(|_| corrupt(key))?;
            }
        }
        self.forget(connection)
    }

    /// Deletes all rows.
    pub fn clear(&self, connection: &Connection) -> Result<(), StoreError> {
        connection.pragma_update(None, "defer_foreign_keys", true)?;
        // Also all counters: the former ones may be ahead of the new rows, and of other
        // coordinators.
        for table in &self.0 {
            connection.execute(&format!("DELETE FROM {}", table.name), [])?;
        }
        Ok(())
    }

    /// Returns whether a row exists.
    pub fn has(&self, connection: &Connection, key: &str) -> Result<bool, StoreError> {
        let (table, key_value) = self.find(key)?;
        let mut statement = connection.prepare_cached(&table.select)?;
        Ok(statement.exists([key_value])?)
    }

    /// Returns the table of a key `TABLE/KEY`, and the value of the primary key.
    fn find(&self, key: &str) -> Result<(&Table, Value), StoreError> {
        let found = || {
            let (name, key) = key.split_once('/')?;
            let table = self.0.iter().find(|table| table.name == name)?;
            if name == COUNTER_TABLE && key != COUNTED_TABLE {
                return None;
            }
            let value = match table.columns[table.key].kind {
                Kind::Integer => Value::Integer(key.parse().ok()?),
                Kind::Text => Value::Text(key.to_owned()),
                Kind::Blob => Value::Blob(from_hex(key)?),
            };
            Some((table, value))
        };
        found().ok_or_else(|| corrupt(key))
    }
}

impl Table {
    fn of(connection: &Connection, name: &str) -> Result<Table, StoreError> {
        let mut statement =
            connection.prepare("SELECT name, type, pk FROM pragma_table_info(?1)")?;
        let mut columns = Vec::new();
        let mut key = 0;
        let mut rows = statement.query([name])?;
        while let Some(row) = rows.next()? {
            let kind = match row.get_ref(1)?.as_str() {
                Ok("INTEGER") => Kind::Integer,
                Ok("BLOB") => Kind::Blob,
                _ => Kind::Text,
            };
            if row.get::<_, i64>(2)? == 1 {
                key = columns.len();
            }
            let name = row.get(0)?;
            columns.push(Column { name, kind });
        }
        Ok(Table::new(name, columns, key))
    }

    fn new(name: &str, columns: Vec<Column>, key: usize) -> Table {
        let names: Vec<&str> = columns.iter().map(|c| c.name.as_str()).collect();
        let marks: Vec<String> = (1..=columns.len()).map(|n| format!("?{n}")).collect();
        let by = &columns[key].name;
        let names = names.join(", ");
        Table {
            select: format!("SELECT {names} FROM {name} WHERE {by} = ?1"),
            insert: format!("INSERT INTO {name} ({names}) VALUES ({})", marks.join(", ")),
            delete: format!("DELETE FROM {name} WHERE {by} = ?1"),
            name: name.to_owned(),
            columns,
            key,
        }
    }

    /// Adds the current state of a row to `rows`.
    fn read_row(
        &self,
        connection: &Connection,
        key: &Value,
        rows: &mut Rows,
    ) -> Result<(), StoreError> {
        let text = match key {
            Value::Integer(number) => number.to_string(),
            Value::Text(text) => text.clone(),
            Value::Blob(bytes) => to_hex(bytes),
            Value::Null | Value::Real(_) => return Err(StoreError::Corrupt("keys")),
        };
        let mut statement = connection.prepare_cached(&self.select)?;
        let row = statement.query_row([key as &dyn ToSql], |row| {
            let mut object = Map::new();
            for (index, column) in self.columns.iter().enumerate() {
                let value = match row.get_ref(index)? {
                    ValueRef::Integer(number) => Json::from(number),
                    ValueRef::Text(text) => Json::from(String::from_utf8_lossy(text).into_owned()),
                    ValueRef::Blob(bytes) => Json::from(to_hex(bytes)),
                    ValueRef::Null | ValueRef::Real(_) => continue,
                };
                object.insert(column.name.clone(), value);
            }
            Ok(object)
        });
        let row = row.optional()?.map(|row| Json::Object(row).to_string());
        rows.insert(format!("{}/{text}", self.name), row.map(String::into_bytes));
        Ok(())
    }

    /// Returns the values of a row if it fits the table and has this key.
    fn values(&self, row: &[u8], key: &Value) -> Option<Vec<Value>> {
        let row: Map<String, Json> = serde_json::from_slice(row).ok()?;
        let values = self.columns.iter().map(|column| {
            Some(match (row.get(&column.name), column.kind) {
                (None, _) => Value::Null,
                (Some(value), Kind::Integer) => Value::Integer(value.as_i64()?),
                (Some(value), Kind::Text) => Value::Text(value.as_str()?.to_owned()),
                (Some(value), Kind::Blob) => Value::Blob(from_hex(value.as_str()?)?),
            })
        });
        let values: Vec<Value> = values.collect::<Option<_>>()?;
        (values.get(self.key) == Some(key)).then_some(values)
    }
}

fn corrupt(key: &str) -> StoreError {
    StoreError::CorruptRow {
        // Bounded, because it is printed.
        key: key.chars().filter(|c| !c.is_control()).take(200).collect(),
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text
        .chars()
        .map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
        .collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(
        digits
            .chunks(2)
            .map(|pair| pair[0] << 4 | pair[1])
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::create_schema;

    fn insert_entry(database: &Connection) {
        let sql = "INSERT INTO audit (at, change, subject, actor) VALUES (0, '', '', '')";
        database.execute(sql, []).expect("inserted");
    }

    #[test]
    fn clear_deletes_rows_and_counters() {
        let mut database = Connection::open_in_memory().expect("a database");
        create_schema(&mut database, "here".as_ref()).expect("laid out");
        let tables = Tables::of(&database).expect("tables");
        let has = |key: &str| tables.has(&database, key).expect("queried");
        assert!(has("mesh/1"));
        assert!(!has("relay/turn.example:3478") && !has("removed/00ff"));
        insert_entry(&database);
        insert_entry(&database);
        assert!(has("audit/2"));
        tables.clear(&database).expect("cleared");
        assert!(!has("audit/2") && !has("mesh/1"));
        insert_entry(&database);
        assert!(has("audit/1"));
    }
}
