# Builds a crate without dependencies, in the profiles for development and for use, and runs it. The
# folder `toolchain` is the compiler's.
set -eu
export CARGO_HOME=$PWD/cargo CARGO_NET_OFFLINE=true CARGO_INCREMENTAL=0 CARGO_TERM_COLOR=never
export PATH=$PWD/toolchain/bin:$PATH
rm -rf crate cargo
mkdir -p crate/src
cd crate
cat >Cargo.toml <<END
[package]
name = "table"
version = "0.1.0"
edition = "2021"
END
{
    echo 'use std::collections::{BTreeMap, HashMap};'
    echo 'use std::fmt::{Debug, Write};'
    for number in $(seq 16); do
        cat <<END
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind$number { One(u32, String), Two { name: String, list: Vec<u64> }, Three(Box<Kind$number>) }
fn make$number(at: u32) -> Kind$number {
    match at % 3 {
        0 => Kind$number::One(at, format!("item {at}")),
        1 => Kind$number::Two { name: at.to_string(), list: (0..at as u64 % 7).collect() },
        _ => Kind$number::Three(Box::new(make$number(at / 3))),
    }
}
fn sum$number(count: u32) -> usize {
    let mut known: BTreeMap<Kind$number, u32> = BTreeMap::new();
    let mut names: HashMap<String, Vec<Kind$number>> = HashMap::new();
    for at in 0..count {
        *known.entry(make$number(at)).or_default() += at;
        names.entry(format!("{:?}", make$number(at / 2))).or_default().push(make$number(at));
    }
    let mut text = String::new();
    for (kind, count) in &known { write!(text, "{kind:?}{count}").unwrap(); }
    text.len() + names.values().map(Vec::len).sum::<usize>()
}
END
    done
    echo 'fn say(what: impl Debug) { println!("{what:?}"); }'
    echo 'fn main() {'
    for number in $(seq 16); do echo "    say(sum$number($number + 20));"; done
    echo '}'
} >src/main.rs
cargo build --quiet
target/debug/table | md5sum
cargo build --quiet --release
target/release/table | md5sum
