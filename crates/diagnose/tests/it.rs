//! The rules from outside: what the documentation says of them, and what they make of recordings.
#![forbid(unsafe_code)]

mod book;
mod recordings;
