use super::*;

fn of(count: usize) -> Sections {
    Sections::new(count * SECTION_BYTES, None, &Arc::new(Nodes::pretended(1, |_| 0)))
}

#[test]
fn frames_come_from_the_lowest_section_and_all_or_nothing() {
    let sections = of(2);
    assert!(!sections.take(&mut [Frame(0); 1], 0, false), "nothing is on line");
    sections.bring_any_online(0).unwrap();
    sections.bring_any_online(0).unwrap();
    assert_eq!(sections.bring_any_online(0).unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
    let mut frames = vec![Frame(0); 2 * SECTION_FRAMES - 3];
    assert!(sections.take(&mut frames, 0, false));
    assert_eq!(frames[5], Frame(5));
    assert!(!sections.take(&mut [Frame(0); 4], 0, false));
    assert_eq!(sections.free_frames(), 3);
    sections.give([frames[9]].into_iter());
    let mut one = [Frame(0)];
    assert!(sections.take(&mut one, 0, false));
    assert_eq!(one, [Frame(9)]);
}

#[test]
fn only_an_empty_section_goes_offline() {
    let sections = of(2);
    let is_refused = |refused| matches!(refused, Err(Refused::State(_)));
    sections.bring_any_online(0).unwrap();
    let mut frame = [Frame(0)];
    assert!(sections.take(&mut frame, 0, false));
    assert!(!sections.give_one_back(0));
    assert!(is_refused(sections.keep_offline(0)));
    assert!(is_refused(sections.begin_offline(1)), "it has no memory");
    sections.begin_offline(0).unwrap();
    assert!(is_refused(sections.begin_offline(0)), "once is enough");
    assert!(is_refused(sections.bring_online(0)));
    assert!(!sections.take(&mut [Frame(0)], 0, false), "it gives no frames");
    assert!(!sections.finish_offline(0, SectionState::Offline).unwrap());
    sections.give(frame.into_iter());
    assert!(sections.finish_offline(0, SectionState::Offline).unwrap());
    assert_eq!((sections.online(), sections.free_frames()), (0, 0));
    assert_eq!(sections.states(), [SectionState::Offline, SectionState::Absent]);
    sections.check(&[]);
}

#[test]
fn the_last_section_that_may_have_memory_keeps_it() {
    let sections = of(2);
    sections.keep_offline(1).unwrap();
    assert_eq!(sections.limit(), SECTION_FRAMES);
    assert!(matches!(sections.keep_offline(0), Err(Refused::Last)));
    sections.bring_any_online(0).unwrap();
    assert!(!sections.can_grow());
    sections.begin_offline(0).unwrap();
    assert!(matches!(sections.finish_offline(0, SectionState::Offline), Err(Refused::Last)));
    sections.stay_online(0);
    sections.check(&[]);
    sections.bring_online(1).unwrap();
    assert_eq!((sections.limit(), sections.online()), (2 * SECTION_FRAMES, 2));
}

#[test]
#[should_panic(expected = "cannot become")]
fn a_change_that_is_not_in_the_table_is_refused() {
    let sections = of(1);
    sections.turn(&mut lock(&sections.inner), 0, SectionState::Online);
}

#[test]
fn every_state_is_reached_and_left() {
    use SectionState::Absent;
    let mut reached = vec![Absent];
    let mut at = 0;
    while at < reached.len() {
        let next = reached[at].next();
        assert!(!next.is_empty(), "{:?} is never left", reached[at]);
        for (state, _) in next {
            if !reached.contains(state) {
                reached.push(*state);
            }
        }
        at += 1;
    }
    assert_eq!(reached.len(), SectionState::ALL.len());
}
