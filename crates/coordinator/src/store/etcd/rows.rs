//! Rows of the tables as keys and values of etcd: `TABLE/KEY`, and a JSON object of the columns.
//!
//! Triggers record the key of every row that a change touches. The new row, or its absence, is read
//! from the table afterwards. Blobs are hexadecimal digits.

use std::collections::{BTreeMap, BTreeSet};

use rusqlite::{Connection, OptionalExtension as _, Row};

use crate::store::StoreError;

/// Tables that all coordinators share. The others are local.
const SHARED: [&str; 9] = [
    "mesh", "policy", "relay", "token", "member", "removed", "former", "freed", "audit",
];
/// SQLite's table of AUTOINCREMENT counters. No trigger is possible.
const COUNTER_TABLE: &str = "sqlite_sequence";
/// Key of the one counter that is shared, of the table of members: the highest row of that table
/// may have been deleted, and a new replica would reuse its id. The highest rows of the other tables
/// are never deleted.
const COUNTER: &str = "sqlite_sequence/member";

/// Rows by `TABLE/KEY`; `None`: deleted.
pub(super) type Rows = BTreeMap<String, Option<Vec<u8>>>;

/// The shared tables of a database.
pub(super) struct Tables(Vec<Table>);

/// SQL of a table. `?1` is the key of a row as text, `?2` its JSON.
struct Table {
    name: String,
    /// Returns the keys of all rows.
    keys: String,
    /// Returns the JSON of a row.
    select: String,
    insert: String,
    delete: String,
}

/// A column.
struct Column {
    name: String,
    is_blob: bool,
    is_key: bool,
}

impl Tables {
    /// Reads the schema, and creates the triggers.
    pub fn of(connection: &Connection) -> Result<Tables, StoreError> {
        let mut tables = Vec::new();
        connection.execute_batch("CREATE TEMP TABLE touched (key TEXT PRIMARY KEY) STRICT")?;
        for name in SHARED {
            let mut statement = connection
                .prepare("SELECT name, type = 'BLOB', pk = 1 FROM pragma_table_info(?1)")?;
            let columns = statement.query_map([name], |row| {
                Ok(Column {
                    name: row.get(0)?,
                    is_blob: row.get(1)?,
                    is_key: row.get(2)?,
                })
            })?;
            let columns: Vec<Column> = columns.collect::<Result<_, _>>()?;
            for (event, row) in [("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")] {
                let key = key_text(&columns, &format!("{row}."));
                connection.execute_batch(&format!(
                    "CREATE TEMP TRIGGER {name}_{event} AFTER {event} ON main.{name}
                     BEGIN INSERT OR IGNORE INTO touched VALUES ('{name}/' || {key}); END"
                ))?;
            }
            tables.push(Table::new(name, &columns));
        }
        // The delete trigger also fires for a row that REPLACE deletes.
        connection.pragma_update(None, "recursive_triggers", true)?;
        tables.push(Table {
            name: COUNTER_TABLE.to_owned(),
            keys: String::new(),
            select: "SELECT json_object('name', name, 'seq', seq) FROM sqlite_sequence
                     WHERE name = ?1"
                .to_owned(),
            // Unlike the other tables, this one accepts values of any type.
            insert: "INSERT INTO sqlite_sequence (name, seq) SELECT ?1, ?2 ->> 'seq'
                     WHERE typeof(?2 ->> 'seq') = 'integer'"
                .to_owned(),
            delete: "DELETE FROM sqlite_sequence WHERE name = ?1".to_owned(),
        });
        Ok(Tables(tables))
    }

    /// Returns all rows.
    pub fn all(&self, connection: &Connection) -> Result<Rows, StoreError> {
        let mut keys = BTreeSet::from([COUNTER.to_owned()]);
        for table in self.0.iter().filter(|table| table.name != COUNTER_TABLE) {
            let mut statement = connection.prepare(&table.keys)?;
            for key in statement.query_map([], key_of)? {
                keys.insert(format!("{}/{}", table.name, key?));
            }
        }
        let mut rows = self.read(connection, keys)?;
        rows.retain(|_, row| row.is_some());
        Ok(rows)
    }

    /// Clears the record of touched rows.
    pub fn forget(&self, connection: &Connection) -> Result<(), StoreError> {
        connection
            .prepare_cached("DELETE FROM temp.touched")?
            .execute([])?;
        Ok(())
    }

    /// Returns the number of rows touched since the last [`Self::forget`], plus one for the
    /// counter.
    pub fn count_touched(&self, connection: &Connection) -> Result<usize, StoreError> {
        let mut statement = connection.prepare_cached("SELECT count(*) + 1 FROM temp.touched")?;
        let count: u32 = statement.query_row([], |row| row.get(0))?;
        Ok(count as usize)
    }

    /// Returns the rows touched since the last [`Self::forget`], and the counter, as they are now.
    pub fn touched(&self, connection: &Connection) -> Result<Rows, StoreError> {
        let mut statement = connection.prepare_cached("SELECT key FROM temp.touched")?;
        let keys = statement.query_map([], key_of)?;
        let mut keys: BTreeSet<String> = keys.collect::<Result<_, _>>()?;
        keys.insert(COUNTER.to_owned());
        self.read(connection, keys)
    }

    /// Returns rows as they are now.
    pub fn read(
        &self,
        connection: &Connection,
        keys: impl IntoIterator<Item = String>,
    ) -> Result<Rows, StoreError> {
        let mut rows = Rows::new();
        for key in keys {
            let (table, text) = self.find(&key)?;
            let mut statement = connection.prepare_cached(&table.select)?;
            let row: Option<String> = statement.query_row([text], |row| row.get(0)).optional()?;
            rows.insert(key, row.map(String::into_bytes));
        }
        Ok(rows)
    }

    /// Replaces rows within a transaction. Deletes first, so that a value of a unique column can
    /// move from one row to another.
    pub fn put(&self, connection: &Connection, rows: &Rows) -> Result<(), StoreError> {
        connection.pragma_update(None, "defer_foreign_keys", true)?;
        for key in rows.keys() {
            self.delete(connection, key)?;
        }
        for (key, row) in rows {
            let Some(row) = row else { continue };
            // Inserting rows has created the counter.
            if key == COUNTER {
                self.delete(connection, key)?;
            }
            let (table, text) = self.find(key)?;
            let row = std::str::from_utf8(row).map_err(|_| corrupt(key))?;
            let mut statement = connection.prepare_cached(&table.insert)?;
            match statement.execute([text, row]) {
                Ok(1) => {}
                _ => return Err(corrupt(key)),
            }
        }
        self.forget(connection)
    }

    fn delete(&self, connection: &Connection, key: &str) -> Result<(), StoreError> {
        let (table, text) = self.find(key)?;
        connection.prepare_cached(&table.delete)?.execute([text])?;
        Ok(())
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

    /// Returns the table of a key `TABLE/KEY`, and the key of the row.
    fn find<'k>(&self, key: &'k str) -> Result<(&Table, &'k str), StoreError> {
        let found = key.split_once('/').and_then(|(name, text)| {
            let table = self.0.iter().find(|table| table.name == name)?;
            (name != COUNTER_TABLE || key == COUNTER).then_some((table, text))
        });
        found.ok_or_else(|| corrupt(key))
    }
}

impl Table {
    fn new(name: &str, columns: &[Column]) -> Table {
        let list = |expression: &dyn Fn(&Column) -> String| {
            let all: Vec<String> = columns.iter().map(expression).collect();
            all.join(", ")
        };
        let text = key_text(columns, "");
        let key = columns.iter().find(|column| column.is_key);
        let key = key.map_or("", |column| &column.name);
        // An index finds the key only in the type of its column.
        let wanted = columns
            .iter()
            .find(|column| column.is_key && column.is_blob);
        let wanted = wanted.map_or("?1", |_| "unhex(?1)");
        let object = list(&|Column { name, is_blob, .. }| {
            if *is_blob {
                format!("'{name}', lower(hex({name}))")
            } else {
                format!("'{name}', {name}")
            }
        });
        let values = list(&|Column { name, is_blob, .. }| {
            if *is_blob {
                format!("unhex(?2 ->> '{name}')")
            } else {
                format!("?2 ->> '{name}'")
            }
        });
        let names = list(&|column| column.name.clone());
        Table {
            name: name.to_owned(),
            keys: format!("SELECT {text} FROM {name}"),
            select: format!("SELECT json_object({object}) FROM {name} WHERE {key} = {wanted}"),
            // Only if the row has this key.
            insert: format!(
                "INSERT INTO {name} ({names}) SELECT {values}
                 WHERE CAST(?2 ->> '{key}' AS TEXT) = ?1"
            ),
            delete: format!("DELETE FROM {name} WHERE {key} = {wanted}"),
        }
    }
}

/// Returns the expression of a row's key as text.
fn key_text(columns: &[Column], row: &str) -> String {
    let key = columns.iter().find(|column| column.is_key);
    key.map_or(String::new(), |Column { name, is_blob, .. }| {
        if *is_blob {
            format!("lower(hex({row}{name}))")
        } else {
            format!("CAST({row}{name} AS TEXT)")
        }
    })
}

fn key_of(row: &Row<'_>) -> rusqlite::Result<String> {
    row.get(0)
}

fn corrupt(key: &str) -> StoreError {
    StoreError::CorruptRow {
        // Bounded, because it is printed.
        key: key.chars().filter(|c| !c.is_control()).take(200).collect(),
    }
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
        let has = |key: &str| {
            let found = tables.read(&database, [key.to_owned()]);
            found.expect("queried")[key].is_some()
        };
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
