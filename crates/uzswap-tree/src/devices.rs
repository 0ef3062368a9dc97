//! The calls of `ioctl` by which a program hands memory to a device, or to the kernel, for use at
//! any time. The preloaded library looks for these calls before the take-over, and the agent after
//! it.

/// The places of an address and a length in the structure of 64-bit numbers that an `ioctl` gets.
struct IoctlLayout {
    number: u32,
    address: u64,
    bytes: u64,
}

const REQUESTS: [IoctlLayout; 5] = [
    // KVM_SET_USER_MEMORY_REGION, KVM_SET_USER_MEMORY_REGION2
    IoctlLayout { number: 0x4020_ae46, address: 3, bytes: 2 },
    IoctlLayout { number: 0x40a0_ae49, address: 3, bytes: 2 },
    // VFIO_IOMMU_MAP_DMA, IOMMU_IOAS_MAP
    IoctlLayout { number: 0x3b71, address: 1, bytes: 3 },
    IoctlLayout { number: 0x3b85, address: 2, bytes: 3 },
    // UFFDIO_REGISTER: the program serves the faults itself.
    IoctlLayout { number: 0xc020_aa00, address: 0, bytes: 1 },
];
/// VHOST_SET_MEM_TABLE: a count, and as many regions of four numbers.
const VHOST_TABLE: u32 = 0x4008_af03;
/// The maximum number of regions of such a table that we read. The kernel accepts fewer.
const REGIONS_MAX: u32 = 4096;

/// True if a call of `ioctl` with this number hands memory over.
pub fn hands_over(number: u32) -> bool {
    number == VHOST_TABLE || REQUESTS.iter().any(|one| one.number == number)
}

/// Calls `each` with the address and the length of all memory that such a call hands over. `word`
/// reads the 64-bit number at a place of the call's structure.
pub fn each_range(number: u32, word: impl Fn(u64) -> u64, mut each: impl FnMut(u64, u64)) {
    if let Some(one) = REQUESTS.iter().find(|one| one.number == number) {
        each(word(one.address), word(one.bytes));
    } else if number == VHOST_TABLE {
        for region in 0..(word(0) as u32).min(REGIONS_MAX) {
            let first = 1 + u64::from(region) * 4;
            each(word(first + 2), word(first + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(number: u32, words: &[u64]) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        each_range(number, |place| words[place as usize], |at, bytes| ranges.push((at, bytes)));
        ranges
    }

    /// The structures are those of the kernel's headers.
    #[test]
    fn memory_that_is_handed_over_is_found() {
        assert_eq!(ranges(0x4020_ae46, &[0, 0x1000, 64, 4096]), [(4096, 64)]);
        assert_eq!(
            ranges(VHOST_TABLE, &[2, 0, 8, 4096, 0, 0, 16, 8192, 0]),
            [(4096, 8), (8192, 16)]
        );
        assert!(ranges(0x5401, &[]).is_empty());
        assert!(hands_over(0x4020_ae46) && hands_over(VHOST_TABLE) && !hands_over(0x5401));
    }
}
