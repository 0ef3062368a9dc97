//! Encryption of the backing.
//!
//! An AEAD with a key that is made at the start and never leaves memory. The key is in the
//! process's own memory and, if the cache outlives the process, in a file that no other process can
//! open. A *generation* is the number of a write, never given twice. With a record's place inside
//! its segment it is the nonce. No nonce is used twice, because each place is sealed once in a
//! generation, even if the write fails. The tag also authenticates owner, place and form. The index
//! keeps the generation of each page's record. A record is thus opened as the index describes it,
//! not as it describes itself: an older, moved or changed record does not open.
//!
//! AES-256-GCM where the processor has the instructions, ChaCha20-Poly1305 otherwise. With either
//! cipher, the bound for one key (2^64 blocks of 16 bytes, as nonces are counted) is out of reach.

use super::shape::SEGMENT_BYTES;
use crate::crash_points::DurableAtomic;
use crate::durable::{Durable, KEY_BYTES};
use crate::ids::{Place, SwapEntry};
use crate::object::Extent;
use ring::aead::{
    AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce,
    UnboundKey,
};
use ring::rand::{SecureRandom, SystemRandom};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_sys::processor;
use uzswap_sys::secret::{Secret, wipe};

/// Authenticates a record.
pub(crate) type Tag = [u8; MAX_TAG_LEN];

/// The number of a write to the backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation(pub(crate) u64);

/// The identity under which a record is sealed and opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) owner: SwapEntry,
    pub(crate) extent: Extent,
    pub(crate) generation: Generation,
}

/// This bit is set in the generations of a forked process.
const FORKED: u64 = 1 << 62;

/// See the module.
pub(crate) struct Seal {
    key: Secret<LessSafeKey>,
    own_generation: DurableAtomic<AtomicU64>,
    durable: Option<Arc<Durable>>,
}

impl Seal {
    /// Makes a seal with a new key. If this process takes a cache over, the seal gets the old
    /// cache's key, and its generations continue. Fails without randomness, or without memory that
    /// may be locked.
    pub(crate) fn new(durable: Option<&Arc<Durable>>) -> io::Result<Self> {
        let has_aes = processor::has_aes();
        Self::with(if has_aes { &AES_256_GCM } else { &CHACHA20_POLY1305 }, durable)
    }

    fn with(algorithm: &'static Algorithm, durable: Option<&Arc<Durable>>) -> io::Result<Self> {
        let key = Secret::try_new(|| {
            let mut bytes = [0; KEY_BYTES];
            let filled = match durable.filter(|durable| durable.is_held()) {
                Some(durable) => {
                    bytes = durable.key();
                    Ok(())
                }
                None => SystemRandom::new().fill(&mut bytes),
            };
            if let Some(durable) = durable {
                durable.keep_key(&bytes);
            }
            let key = filled.and_then(|()| UnboundKey::new(algorithm, &bytes));
            wipe(&mut bytes);
            key.map(LessSafeKey::new).map_err(|_| io::Error::other("no random bytes"))
        })?;
        Ok(Self { key, own_generation: DurableAtomic::new(0), durable: durable.cloned() })
    }

    /// The generation of the next write. That write seals each place once.
    pub(crate) fn next(&self) -> Generation {
        let newest = self.durable.as_ref().map_or(&self.own_generation, |d| d.generation());
        let before = newest.fetch_add(1, Relaxed);
        assert!(before < u64::MAX, "a key is good for 2^64 writes");
        Generation(before + 1)
    }

    /// Lets forked processes open and seal as well.
    pub(crate) fn let_forks_inherit(&self) -> io::Result<()> {
        self.key.let_forks_inherit()
    }

    /// Called in a forked process, which has the same key as its parent. So its generations
    /// continue from a random number, far from those of its parent and of other children. There are
    /// 2^62 starts, so two processes that make 2^32 writes each share a generation with a chance of
    /// one in 2^29.
    pub(crate) fn go_on_in_fork(&self) -> io::Result<()> {
        self.key.lock_again()?;
        let mut bytes = [0; 8];
        let random = SystemRandom::new().fill(&mut bytes);
        random.map_err(|_| io::Error::other("no random bytes"))?;
        let begin = u64::from_le_bytes(bytes) >> 2 | FORKED;
        self.own_generation.store(begin, Relaxed);
        Ok(())
    }

    /// Encrypts bytes in place.
    pub(crate) fn seal(&self, identity: Identity, bytes: &mut [u8]) -> Tag {
        let tag =
            self.key.seal_in_place_separate_tag(identity.nonce(), identity.bound(), bytes).expect(
                "a record is shorter than the cipher's limit, and the tag is as long as its own",
            );
        tag.as_ref().try_into().expect("a tag has 16 bytes")
    }

    /// Decrypts bytes in place. If the bytes are not the sealed bytes, the result is `false`, and
    /// the bytes are garbage.
    pub(crate) fn open(&self, identity: Identity, bytes: &mut [u8], tag: Tag) -> bool {
        let (nonce, bound) = (identity.nonce(), identity.bound());
        self.key.open_in_place_separate_tag(nonce, bound, tag.into(), bytes, 0..).is_ok()
    }
}

/// Bytes that the tag authenticates besides the nonce.
const BOUND_BYTES: usize = 4 + 8 + 2 + 1;

const _: () = assert!(NONCE_LEN == 8 + 4 && SEGMENT_BYTES as u64 / Place::UNIT <= u32::MAX as u64);

impl Identity {
    fn nonce(self) -> Nonce {
        let offset = self.extent.place.byte() % SEGMENT_BYTES as u64 / Place::UNIT;
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&self.generation.0.to_le_bytes());
        nonce[8..].copy_from_slice(&(offset as u32).to_le_bytes());
        Nonce::assume_unique_for_key(nonce)
    }

    fn bound(self) -> Aad<[u8; BOUND_BYTES]> {
        let mut bound = [0; BOUND_BYTES];
        bound[..4].copy_from_slice(&self.owner.0.to_le_bytes());
        bound[4..12].copy_from_slice(&self.extent.place.0.to_le_bytes());
        bound[12..14].copy_from_slice(&self.extent.form.bytes.to_le_bytes());
        bound[14] = self.extent.form.codec as u8;
        Aad::from(bound)
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_fork_seals_under_other_numbers_than_its_parent() {
        let seal = Seal::new(None).unwrap();
        let first = seal.next();
        seal.go_on_in_fork().unwrap();
        let second = seal.next();
        seal.go_on_in_fork().unwrap();
        let third = seal.next();
        assert!(first.0 == 1 && second.0 > FORKED && third.0 > FORKED && second != third);
    }
    use crate::compress::Codec;
    use crate::object::Form;

    fn identity(owner: u32, place: u64, bytes: u16, codec: Codec, generation: u64) -> Identity {
        let extent = Extent { place: Place(place), form: Form { bytes, codec } };
        Identity { owner: SwapEntry(owner), extent, generation: Generation(generation) }
    }

    #[test]
    fn a_sealed_object_opens_under_its_own_identity_and_under_no_other() {
        for algorithm in [&AES_256_GCM, &CHACHA20_POLY1305] {
            let seal = Seal::with(algorithm, None).unwrap();
            let is = identity(1, 16384 * 3 + 7, 700, Codec::Zstd, 9);
            let plain: [u8; 704] = std::array::from_fn(|at| at as u8);
            let mut sealed = plain;
            let tag = seal.seal(is, &mut sealed);
            assert!(sealed.windows(8).all(|part| !plain.windows(8).any(|other| other == part)));
            let opens = |identity, bytes: &[u8], tag| {
                let mut bytes = bytes.to_vec();
                seal.open(identity, &mut bytes, tag).then_some(bytes)
            };
            assert_eq!(opens(is, &sealed, tag).as_deref(), Some(&plain[..]));
            for other in [
                identity(2, 16384 * 3 + 7, 700, Codec::Zstd, 9),
                identity(1, 16384 * 3 + 8, 700, Codec::Zstd, 9),
                identity(1, 16384 * 4 + 7, 700, Codec::Zstd, 9),
                identity(1, 16384 * 3 + 7, 701, Codec::Zstd, 9),
                identity(1, 16384 * 3 + 7, 700, Codec::Lz4, 9),
                identity(1, 16384 * 3 + 7, 700, Codec::Zstd, 8),
            ] {
                assert_eq!(opens(other, &sealed, tag), None, "{other:?}");
            }
            for bit in 0..sealed.len() * 8 {
                let mut turned = sealed;
                turned[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(opens(is, &turned, tag), None, "bit {bit}");
            }
            for bit in 0..tag.len() * 8 {
                let mut turned = tag;
                turned[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(opens(is, &sealed, turned), None, "bit {bit} of the tag");
            }
            assert_eq!(opens(is, &sealed[..703], tag), None);
            let another = Seal::with(algorithm, None).unwrap();
            assert!(!another.open(is, &mut sealed, tag), "each cache has a key of its own");
        }
    }

    #[test]
    fn no_generation_is_given_twice() {
        let seal = Seal::new(None).unwrap();
        let mut given: Vec<u64> = std::thread::scope(|scope| {
            let take = || (0..1000).map(|_| seal.next().0).collect::<Vec<_>>();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        given.sort_unstable();
        given.dedup();
        assert_eq!((given.len(), given[0]), (4000, 1));
    }
}
