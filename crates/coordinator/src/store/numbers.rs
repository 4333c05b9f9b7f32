//! Numbers of members and devices, which determine their addresses.

use seikan_proto::mesh::Networks;

use super::StoreError;
use super::rows::{Freed, Head, Mesh};

/// Takes the lowest number that nobody has had. If there is none, takes the number that has been
/// free for longest.
pub(super) fn take(mesh: &mut Mesh, networks: &Networks) -> Result<u32, StoreError> {
    let (head, capacity) = (mesh.head(), networks.capacity());
    if head.highest < capacity {
        let highest = head.highest + 1;
        mesh.put(Head { highest, ..head })?;
        return Ok(highest);
    }
    let oldest = mesh.freed.all().next();
    let &Freed { since, number, .. } = oldest.ok_or(StoreError::Full { capacity })?;
    mesh.delete::<Freed>(since)?;
    Ok(number)
}
