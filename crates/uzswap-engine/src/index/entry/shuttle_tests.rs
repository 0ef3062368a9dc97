//! The lock of an entry, under a scheduler that tries many orders.

use super::*;
use crate::shuttle_tests::explore;
use shuttle::thread;
use std::sync::Arc;

#[test]
fn an_entry_s_lock_excludes() {
    explore(|| {
        let entry = Arc::new(Entry::new());
        let increment = |entry: &Entry| {
            let mut locked = entry.lock().unwrap();
            let value = locked.second();
            thread::yield_now();
            locked.set_second(value + 1);
        };
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let entry = entry.clone();
                thread::spawn(move || (0..2).for_each(|_| increment(&entry)))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(entry.lock().unwrap().second(), 6);
        assert_eq!(entry.peek(), Word::ABSENT);
    });
}
