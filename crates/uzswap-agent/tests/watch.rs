//! A program preloads the agent, which has its own allocator and thread variables, so its tests are
//! in `tests/`. Two files need none of this, and are tested here.

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
