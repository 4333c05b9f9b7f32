//! Who may talk to whom: the text that an administrator wrote, and the tags that members have. The members themselves apply it.

use rusqlite::{Connection, OptionalExtension as _};
use seikan_proto::mesh::{MAX_TAGS, Name, Party, Policy};

use super::tokens::{from_json, to_json};
use super::{Actor, MemberId, Store, StoreError, audit, next_revision, seconds};

impl Store {
    /// The policy as it was written; empty if none was.
    ///
    /// # Errors
    /// [`StoreError::Sqlite`].
    pub fn policy(&self) -> Result<String, StoreError> {
        self.look(|connection| Ok(text_of(connection)?.0))
    }

    /// Puts a policy in the place of the one that there is; whether it is another text. Members are told if it is.
    ///
    /// # Errors
    /// [`StoreError::Policy`] if it is none; [`StoreError::Sqlite`].
    pub fn set_policy(&self, text: &str, by: &Actor, now: u64) -> Result<bool, StoreError> {
        let policy = Policy::parse(text)?;
        let (text, by) = (text.to_owned(), by.clone());
        self.change(move |transaction| {
            if text_of(transaction)?.0 == text {
                return Ok(false);
            }
            let revision = next_revision(transaction)?;
            transaction.execute(
                "UPDATE policy SET text = ?1, revision = ?2",
                (&text, revision),
            )?;
            let subject = match policy.rules().len() {
                1 => "1 rule".to_owned(),
                count => format!("{count} rules"),
            };
            audit::note(transaction, seconds(now), "policy set", &subject, &by)?;
            Ok(true)
        })
    }

    /// Gives a member these tags in the place of those that it has; whether they are others. Members are told if they are.
    ///
    /// # Errors
    /// [`StoreError::OutOfBounds`]: more than [`MAX_TAGS`]; [`StoreError::NotAMember`]; [`StoreError::Sqlite`].
    pub fn set_tags(
        &self,
        name: &Name,
        tags: &[Name],
        by: &Actor,
        now: u64,
    ) -> Result<bool, StoreError> {
        if tags.len() > MAX_TAGS {
            return Err(StoreError::OutOfBounds("a member has 16 tags at most"));
        }
        let json = to_json(tags)?;
        let (name, tags, by) = (name.clone(), tags.to_vec(), by.clone());
        self.change(move |transaction| {
            let sql = "SELECT tags FROM member WHERE name = ?1";
            let known = transaction.query_row(sql, [name.as_str()], |row| row.get::<_, String>(0));
            if known.optional()?.ok_or(StoreError::NotAMember)? == json {
                return Ok(false);
            }
            let revision = next_revision(transaction)?;
            transaction.execute(
                "UPDATE member SET tags = ?2, revision = ?3 WHERE name = ?1",
                (name.as_str(), &json, revision),
            )?;
            let tags: Vec<&str> = tags.iter().map(Name::as_str).collect();
            let subject = format!("{name}: {}", tags.join(" "));
            audit::note(transaction, seconds(now), "tags set", &subject, &by)?;
            Ok(true)
        })
    }
}

/// The policy, if it changed after that revision, or 0, at which none knows any.
pub(super) fn policy_after(
    connection: &Connection,
    since: i64,
) -> Result<Option<Policy>, StoreError> {
    let (text, revision) = text_of(connection)?;
    if since > 0 && revision <= since {
        return Ok(None);
    }
    let policy = Policy::parse(&text).map_err(|_| StoreError::Corrupt("policy"))?;
    Ok(Some(policy))
}

/// What the others know the asker by, if that changed after that revision, or 0.
pub(super) fn party_after(
    connection: &Connection,
    since: i64,
    asker: MemberId,
) -> Result<Option<Party>, StoreError> {
    let mut statement = connection
        .prepare_cached("SELECT name, tags FROM member WHERE id = ?1 AND revision > ?2")?;
    let found = statement.query_row((asker.0, since), |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))
    });
    let Some((name, tags)) = found.optional()? else {
        return Ok(None);
    };
    let name = name.parse().map_err(|_| StoreError::Corrupt("names"))?;
    let tags = from_json(&tags, "tags")?;
    Ok(Some(Party { name, tags }))
}

fn text_of(connection: &Connection) -> Result<(String, i64), StoreError> {
    let mut statement = connection.prepare_cached("SELECT text, revision FROM policy")?;
    Ok(statement.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?)
}
