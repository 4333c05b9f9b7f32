//! Numbers of members and devices, which determine their addresses.

use rusqlite::Transaction;
use seikan_proto::mesh::Networks;

use super::{StoreError, first, value};

/// Takes the lowest number that nobody has had. If there is none, takes the number that has been
/// free for longest.
pub(super) fn take(transaction: &Transaction<'_>, networks: &Networks) -> Result<u32, StoreError> {
    let capacity = networks.capacity();
    let highest: u32 = value(transaction, "SELECT highest FROM mesh", [])?;
    if highest < capacity {
        transaction.execute("UPDATE mesh SET highest = ?1", [highest + 1])?;
        return Ok(highest + 1);
    }
    let sql = "SELECT number FROM freed ORDER BY since LIMIT 1";
    let freed: Option<u32> = first(transaction, sql, [], |row| row.get(0))?;
    let number = freed.ok_or(StoreError::Full { capacity })?;
    transaction.execute("DELETE FROM freed WHERE number = ?1", [number])?;
    Ok(number)
}

/// Frees a number as of a revision, which no other number may have been freed at. `device` is the
/// device that had it, in JSON.
pub(super) fn free(
    transaction: &Transaction<'_>,
    number: u32,
    revision: i64,
    device: Option<&str>,
) -> Result<(), StoreError> {
    let sql = "INSERT INTO freed (number, since, device) VALUES (?1, ?2, ?3)";
    transaction.execute(sql, (number, revision, device))?;
    Ok(())
}

/// Takes a number that is free.
pub(super) fn take_back(transaction: &Transaction<'_>, number: u32) -> Result<(), StoreError> {
    transaction.execute("DELETE FROM freed WHERE number = ?1", [number])?;
    Ok(())
}
