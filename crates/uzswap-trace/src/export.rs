//! A trace in libCacheSim's format (`oracleGeneral`): 24 bytes for each touch, without gaps, in
//! little-endian numbers.
//!
//! ```text
//! u32 time, s | u64 object | u32 bytes | i64 number of the touch that is its next; -1: none
//! ```
//! The size of an object is the page's size in the pool, at least 1: libCacheSim leaves out objects
//! without a size. The format is defined by its `oracleGeneralBin.h`.

use crate::header::TraceError;
use crate::read::{self, Trace};
use crate::steps::Steps;
use std::io::{BufWriter, Write};
use std::path::Path;
use uzswap_policy::replay::Step;

/// Bytes of a touch.
pub(crate) const RECORD_BYTES: usize = 24;

impl Steps {
    /// Writes the touches to a new file, and returns their number.
    pub fn export(&self, trace: &Trace, path: &Path) -> Result<u64, TraceError> {
        let write = || {
            let records = self.records(trace);
            let mut file = BufWriter::new(read::create(path)?);
            records.iter().try_for_each(|record| file.write_all(record))?;
            file.flush()?;
            Ok(records.len() as u64)
        };
        write().map_err(|source| TraceError::Write { path: path.into(), source })
    }

    fn records(&self, trace: &Trace) -> Vec<[u8; RECORD_BYTES]> {
        let touches = self.all.iter().zip(&self.events).filter_map(|(step, event)| match *step {
            Step::Touch { page, bytes, .. } => Some((page, bytes, trace.events[*event].micros)),
            Step::Gone { .. } => None,
        });
        let touches: Vec<_> = touches.collect();
        let mut next = vec![-1; self.pages];
        let mut records = vec![[0; RECORD_BYTES]; touches.len()];
        for (at, (page, bytes, micros)) in touches.into_iter().enumerate().rev() {
            let next = std::mem::replace(&mut next[page as usize], at as i64);
            let record = &mut records[at];
            record[..4].copy_from_slice(&((micros / 1_000_000) as u32).to_le_bytes());
            record[4..12].copy_from_slice(&u64::from(page).to_le_bytes());
            record[12..16].copy_from_slice(&u32::from(bytes.max(1)).to_le_bytes());
            record[16..].copy_from_slice(&next.to_le_bytes());
        }
        records
    }
}
