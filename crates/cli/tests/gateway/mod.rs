//! The gateway as a program, with devices in namespaces that run nothing but a kernel.

mod bypass;
mod lan;
mod pair;
mod repair;
mod routed;
mod rules;
mod site;
mod sites;
mod stream;
mod tagger;
mod traffic;
