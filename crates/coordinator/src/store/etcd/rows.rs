//! Rows of the tables as keys and values of etcd.
//!
//! A change is found by triggers, which note the table and the primary key of every row that is touched. What becomes of a row is
//! read from the table afterwards: the whole row, or that it is gone.

use std::collections::BTreeMap;

use rusqlite::types::{Value, ValueRef};
use rusqlite::{Connection, OptionalExtension as _, ToSql, params_from_iter};
use serde_json::{Map, Value as Json};

use crate::store::StoreError;

/// Tables that all coordinators share. The others are each coordinator's own.
const SHARED: [&str; 9] = [
    "mesh", "policy", "relay", "token", "member", "removed", "former", "freed", "audit",
];
/// Of the counters behind AUTOINCREMENT the one whose highest row can be gone: a new replica would give its id again. Tokens stay, and
/// the newest entry of the audit does.
const COUNTED: &str = "member";
/// SQLite's table of counters.
const COUNTERS: &str = "sqlite_sequence";

/// Rows by `TABLE/KEY`; `None`: gone.
pub(super) type Rows = BTreeMap<String, Option<Vec<u8>>>;

/// The shared tables of a database.
pub(super) struct Tables(Vec<Table>);

struct Table {
    name: String,
    columns: Vec<Column>,
    /// Place of the primary key among them.
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
    /// In JSON, hexadecimal digits.
    Blob,
}

impl Tables {
    /// Looks at the schema, and has changes noted from now on.
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
        // A row that another one replaces is touched, too.
        connection.pragma_update(None, "recursive_triggers", true)?;
        let column = |name: &str, kind| Column {
            name: name.to_owned(),
            kind,
        };
        let columns = vec![column("name", Kind::Text), column("seq", Kind::Integer)];
        tables.push(Table::new(COUNTERS, columns, 0));
        Ok(Tables(tables))
    }

    /// Every row that there is.
    pub fn all(&self, connection: &Connection) -> Result<Rows, StoreError> {
        let mut rows = Rows::new();
        for table in self.0.iter().filter(|table| table.name != COUNTERS) {
            let sql = format!(
                "SELECT {} FROM {}",
                table.columns[table.key].name, table.name
            );
            let mut statement = connection.prepare(&sql)?;
            let keys = statement.query_map([], |row| row.get::<_, Value>(0))?;
            for key in keys {
                table.note(connection, &key?, &mut rows)?;
            }
        }
        if self.counter(connection)?.is_some() {
            let counters = self.0.iter().filter(|table| table.name == COUNTERS);
            for table in counters {
                table.note(connection, &Value::Text(COUNTED.to_owned()), &mut rows)?;
            }
        }
        Ok(rows)
    }

    /// Forgets what was noted.
    pub fn forget(&self, connection: &Connection) -> Result<(), StoreError> {
        connection
            .prepare_cached("DELETE FROM temp.touched")?
            .execute([])?;
        Ok(())
    }

    /// The counter, to be given to [`Self::touched`].
    pub fn counter(&self, connection: &Connection) -> Result<Option<i64>, StoreError> {
        let mut statement =
            connection.prepare_cached("SELECT seq FROM sqlite_sequence WHERE name = ?1")?;
        Ok(statement
            .query_row([COUNTED], |row| row.get(0))
            .optional()?)
    }

    /// How many rows were touched since the last [`Self::forget`], the counter's included.
    pub fn count_touched(&self, connection: &Connection) -> Result<usize, StoreError> {
        let sql = "SELECT count(*) FROM (SELECT DISTINCT name, key FROM temp.touched)";
        let count: u32 = connection
            .prepare_cached(sql)?
            .query_row([], |row| row.get(0))?;
        Ok(count as usize + 1)
    }

    /// What has become of the rows that were touched since the last [`Self::forget`].
    pub fn touched(
        &self,
        connection: &Connection,
        counter: Option<i64>,
    ) -> Result<Rows, StoreError> {
        let mut rows = Rows::new();
        for table in &self.0 {
            if table.name == COUNTERS {
                if self.counter(connection)? != counter {
                    table.note(connection, &Value::Text(COUNTED.to_owned()), &mut rows)?;
                }
                continue;
            }
            let mut statement = connection
                .prepare_cached("SELECT DISTINCT key FROM temp.touched WHERE name = ?1")?;
            let keys = statement.query_map([&table.name], |row| row.get::<_, Value>(0))?;
            for key in keys {
                table.note(connection, &key?, &mut rows)?;
            }
        }
        Ok(rows)
    }

    /// Puts rows in, within a transaction; what was there under their keys goes first, so that what goes from one row to another
    /// is nowhere twice.
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
                if table.name == COUNTERS {
                    // The rows that it counts have made one.
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

    /// Takes all rows away.
    pub fn clear(&self, connection: &Connection) -> Result<(), StoreError> {
        connection.pragma_update(None, "defer_foreign_keys", true)?;
        // And all counters: those of what was here before may be ahead of what is put in, and of the other coordinators'.
        for table in &self.0 {
            connection.execute(&format!("DELETE FROM {}", table.name), [])?;
        }
        Ok(())
    }

    /// Whether there is such a row.
    pub fn has(&self, connection: &Connection, key: &str) -> Result<bool, StoreError> {
        let (table, key_value) = self.find(key)?;
        let mut statement = connection.prepare_cached(&table.select)?;
        Ok(statement.exists([key_value])?)
    }

    /// The table of a key `TABLE/KEY`, and the primary key.
    fn find(&self, key: &str) -> Result<(&Table, Value), StoreError> {
        let found = || {
            let (name, key) = key.split_once('/')?;
            let table = self.0.iter().find(|table| table.name == name)?;
            if name == COUNTERS && key != COUNTED {
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

    /// Notes what has become of a row.
    fn note(
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
            for (place, column) in self.columns.iter().enumerate() {
                let value = match row.get_ref(place)? {
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

    /// The values of a row, if it is one of this table and has this key.
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
        // It is shown to people.
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
    use crate::store::lay_out;

    fn note(database: &Connection) {
        let sql = "INSERT INTO audit (at, what, subject, actor) VALUES (0, '', '', '')";
        database.execute(sql, []).expect("noted");
    }

    #[test]
    fn what_is_cleared_is_gone_and_counted_anew() {
        let mut database = Connection::open_in_memory().expect("a database");
        lay_out(&mut database, "here".as_ref()).expect("laid out");
        let tables = Tables::of(&database).expect("tables");
        let has = |key: &str| tables.has(&database, key).expect("asked");
        assert!(has("mesh/1"));
        assert!(!has("relay/turn.example:3478") && !has("removed/00ff"));
        note(&database);
        note(&database);
        assert!(has("audit/2"));
        tables.clear(&database).expect("cleared");
        assert!(!has("audit/2") && !has("mesh/1"));
        note(&database);
        assert!(has("audit/1"));
    }
}
