//! aarch64: for each variable the dynamic linker writes the address of a function beside the
//! variable's place (a descriptor, *TLSDESC*). The compiler's code calls that function, which may
//! change no register but `x0` and the flags, and returns the distance from the thread pointer.

use super::{ROOM, VARIABLES, distance_to_variables};
use std::arch::naked_asm;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The linker's data for each variable.
#[repr(C)]
struct Descriptor {
    function: AtomicUsize,
    argument: AtomicUsize,
}

/// A relocation of the dynamic linker's.
#[repr(C)]
struct Relocation {
    offset: u64,
    kind: u32,
    symbol: u32,
    addend: i64,
}

unsafe extern "C" {
    /// The linker's: this library's entries for the dynamic linker, and where the library begins.
    static _DYNAMIC: [u64; 2];
    static __ehdr_start: u8;
}

/// Makes each descriptor lead to the variables in the room. False if a variable is not this
/// library's own.
pub fn redirect() -> bool {
    const KIND: u32 = 1031;
    let base = &raw const __ehdr_start as usize;
    relocations().all(|relocation| {
        if relocation.kind != KIND {
            return true;
        }
        let at = base + relocation.offset as usize;
        // SAFETY: the dynamic linker has written a descriptor there. This library is linked so that
        // the place stays writable (build.rs).
        let descriptor = unsafe { &*(at as *const Descriptor) };
        let function: unsafe extern "C" fn() = find;
        descriptor.argument.store(relocation.addend as usize, Relaxed);
        descriptor.function.store(function as usize, Relaxed);
        relocation.symbol == 0
    })
}

/// The relocations of this library, in both of its tables.
fn relocations() -> impl Iterator<Item = &'static Relocation> {
    /// Pairs of entries: the address of a table, and its bytes.
    const TABLES: [[u64; 2]; 2] = [[7, 8], [23, 2]];
    let base = &raw const __ehdr_start as usize;
    TABLES.into_iter().flat_map(move |pair| {
        let [address, bytes] = pair.map(|name| entry(name).unwrap_or(0) as usize);
        // Some dynamic linkers have added the base.
        let start = if address < base { base + address } else { address };
        let count = bytes / size_of::<Relocation>();
        // SAFETY: a table of this library, which is mapped; without it the count is zero.
        (0..count).map(move |at| unsafe { &*(start as *const Relocation).add(at) })
    })
}

/// The value of an entry for the dynamic linker.
fn entry(name: u64) -> Option<u64> {
    let first = &raw const _DYNAMIC;
    // SAFETY: the entries are mapped, and the last has the name 0.
    let entries = (0..).map(|at| unsafe { first.add(at).read_volatile() });
    let mut entries = entries.take_while(|[name, _]| *name != 0);
    entries.find(|[one, _]| *one == name).map(|[_, value]| value)
}

/// The function of each descriptor, whose address is in `x0`. In a thread without variables it has
/// them made, and keeps all registers meanwhile.
///
/// # Safety
/// Called as the compiler's code calls the function of a descriptor.
#[unsafe(naked)]
unsafe extern "C" fn find() {
    naked_asm!(
        ".cfi_startproc",
        "stp x1, x2, [sp, #-32]!",
        ".cfi_def_cfa_offset 32",
        "str x3, [sp, #16]",
        "adrp x2, {room}",
        "ldr x2, [x2, :lo12:{room}]",
        "mrs x1, tpidr_el0",
        // The thread's mark.
        "ldr x3, [x1, x2]",
        "cbz x3, 2f",
        "ldr x0, [x0, #8]",
        "adrp x1, {variables}",
        "ldr x1, [x1, :lo12:{variables}]",
        "add x0, x0, x2",
        "add x0, x0, x1",
        "3:",
        "ldr x3, [sp, #16]",
        "ldp x1, x2, [sp], #32",
        ".cfi_def_cfa_offset 0",
        "ret",
        "2:",
        ".cfi_def_cfa_offset 32",
        "sub sp, sp, #672",
        ".cfi_def_cfa_offset 704",
        "stp x0, x30, [sp]",
        ".cfi_offset x30, -696",
        "stp x4, x5, [sp, #16]",
        "stp x6, x7, [sp, #32]",
        "stp x8, x9, [sp, #48]",
        "stp x10, x11, [sp, #64]",
        "stp x12, x13, [sp, #80]",
        "stp x14, x15, [sp, #96]",
        "stp x16, x17, [sp, #112]",
        "mrs x1, nzcv",
        "stp x18, x1, [sp, #128]",
        ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
        "str q\\number, [sp, #160 + 16 * \\number]",
        ".endr",
        ".irp number, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
        "str q\\number, [sp, #160 + 16 * \\number]",
        ".endr",
        "mrs x0, tpidr_el0",
        "bl {make}",
        ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
        "ldr q\\number, [sp, #160 + 16 * \\number]",
        ".endr",
        ".irp number, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
        "ldr q\\number, [sp, #160 + 16 * \\number]",
        ".endr",
        "ldp x18, x1, [sp, #128]",
        "msr nzcv, x1",
        "ldp x16, x17, [sp, #112]",
        "ldp x14, x15, [sp, #96]",
        "ldp x12, x13, [sp, #80]",
        "ldp x10, x11, [sp, #64]",
        "ldp x8, x9, [sp, #48]",
        "ldp x6, x7, [sp, #32]",
        "ldp x4, x5, [sp, #16]",
        "ldp x1, x30, [sp]",
        ".cfi_restore x30",
        "ldr x1, [x1, #8]",
        "add x0, x0, x1",
        "add sp, sp, #672",
        ".cfi_def_cfa_offset 32",
        "b 3b",
        ".cfi_endproc",
        room = sym ROOM,
        variables = sym VARIABLES,
        make = sym distance_to_variables,
    )
}
