//! The gateway with the real program: devices on which nothing runs but a kernel, in namespaces.

mod bypass;
mod lan;
mod pair;
mod routed;
mod rules;
mod site;
mod sites;
mod stream;
mod tagger;
mod traffic;
