//! The agent is a library that a program preloads, with an allocator and thread variables of its
//! own: its tests are in `tests/`. Two of its files need nothing of that and are tested here.

#[path = "../src/decide.rs"]
#[expect(dead_code, reason = "the library uses more of it than the tests do")]
mod decide;
#[path = "watch/simulator.rs"]
mod simulator;
#[path = "../src/stage.rs"]
#[expect(dead_code, reason = "the library uses more of it than the tests do")]
mod stage;

use uzswap_tree::front::Front;

/// A test has no preloaded library.
fn front() -> Option<&'static Front> {
    None
}

fn die(parts: &[&str]) -> ! {
    panic!("{}", parts.concat())
}
