//! The rules from outside: their documentation, and their verdicts about recordings.
#![forbid(unsafe_code)]

mod documentation;
mod recordings;
