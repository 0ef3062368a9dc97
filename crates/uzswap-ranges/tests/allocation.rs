//! With preloaded memory, an insertion allocates nothing.

mod counting;

use counting::allocations;
use uzswap_ranges::{Hole, Insert, Item, Preload, RangeIndex, SkipList};

#[test]
fn an_insertion_with_a_preload_allocates_nothing() {
    let (list, mut preload) = (SkipList::new(), Preload::default());
    let (mut ready, mut used) = (0, 0);
    for n in 0..10_000 {
        let before = allocations();
        list.preload(&mut preload);
        let between = allocations();
        if n % 2 == 0 {
            let item = Item { key: 3_000_000 + n * 7919 % 100_003 * 10, size: 3, value: n };
            assert_eq!(list.insert(item, &mut preload), Insert::Inserted);
        } else {
            let hole = Hole { hint: n * 97, size: 5, align: 1, within: 0..2_000_000, value: n };
            assert!(list.insert_hole(&hole, &mut preload).is_some());
        }
        ready += between - before;
        used += allocations() - between;
    }
    let leaves = list.check().leaves;
    assert!(leaves > 100 && ready >= leaves, "{ready} allocations for {leaves} leaves");
    assert_eq!(used, 0);
}
