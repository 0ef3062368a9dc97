//! The fast path of a system call keeps only SSE registers: this test reads the machine code of
//! this path, instruction by instruction.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, reason = "tests")]

use iced_x86::{CpuidFeature, Decoder, DecoderOptions, Instruction, Register};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol, ObjectSymbolTable};
use object::{RelocationTarget, SymbolKind};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use uzswap_tests::program;

/// Processor features that this code may use: general registers, and SSE.
const ALLOWED: [CpuidFeature; 16] = [
    CpuidFeature::INTEL8086,
    CpuidFeature::INTEL8086_ONLY,
    CpuidFeature::INTEL186,
    CpuidFeature::INTEL286,
    CpuidFeature::INTEL386,
    CpuidFeature::INTEL386_ONLY,
    CpuidFeature::INTEL486,
    CpuidFeature::X64,
    CpuidFeature::CMOV,
    CpuidFeature::CX8,
    CpuidFeature::MULTIBYTENOP,
    CpuidFeature::PAUSE,
    CpuidFeature::SYSCALL,
    CpuidFeature::SSE,
    CpuidFeature::SSE2,
    CpuidFeature::CET_IBT,
];

/// Functions that the test does not follow: they end the process, or ran once before any call was
/// replaced.
const ENDS: [&str; 3] = ["panicking", "_fail", "__tls_get_addr"];

/// A library's functions, and the targets that the dynamic linker fills in.
struct Library<'a> {
    /// By first address: name, and bytes of code.
    functions: BTreeMap<u64, (&'a str, &'a [u8])>,
    /// By address: a target in the library, or the name of another library's function.
    linked: HashMap<u64, Result<u64, &'a str>>,
    /// Jumps through entries of `linked`. The functions have no names.
    jumps: Option<(u64, &'a [u8])>,
}

impl<'a> Library<'a> {
    fn read(bytes: &'a [u8]) -> Self {
        let file: ElfFile64<'a> = ElfFile64::parse(bytes).unwrap();
        let mut functions = BTreeMap::new();
        for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text) {
            let section = symbol.section_index().map(|index| file.section_by_index(index).unwrap());
            let code = section
                .and_then(|section| section.data_range(symbol.address(), symbol.size()).unwrap());
            if let Some(code) = code.filter(|code| !code.is_empty()) {
                functions.insert(symbol.address(), (symbol.name().unwrap(), code));
            }
        }
        let dynamic = file.dynamic_symbol_table().unwrap();
        let target = |relocation: &object::Relocation| match relocation.target() {
            RelocationTarget::Symbol(index) => {
                let symbol = dynamic.symbol_by_index(index).unwrap();
                if symbol.is_definition() {
                    Ok(symbol.address())
                } else {
                    Err(symbol.name().unwrap())
                }
            }
            _ => Ok(relocation.addend() as u64),
        };
        let relocations = file.dynamic_relocations().unwrap();
        let linked = relocations.map(|(at, relocation)| (at, target(&relocation))).collect();
        let jumps = file.section_by_name(".plt");
        let jumps = jumps.map(|section| (section.address(), section.data().unwrap()));
        Self { functions, linked, jumps }
    }

    /// The start of the function around an address.
    fn function(&self, address: u64) -> Option<u64> {
        let (start, (_, code)) = self.functions.range(..=address).next_back()?;
        (address < start + code.len() as u64).then_some(*start)
    }

    /// The target of an address. If the address has a jump through `linked`, it is that jump's
    /// target.
    fn behind_jump(&self, address: u64) -> Result<u64, &'a str> {
        let Some((start, code)) = self.jumps else { return Ok(address) };
        let at = address.wrapping_sub(start) as usize;
        let Some(code) = code.get(at..) else { return Ok(address) };
        let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
        let jump = decoder.iter().take(3).find(Instruction::is_jmp_near_indirect);
        self.linked[&jump.unwrap().ip_rel_memory_address()]
    }

    /// The targets of an instruction, besides the next instruction: that of its jump or call, and
    /// an address of code that it loads.
    fn targets(&self, instruction: &Instruction) -> Vec<Result<u64, &'a str>> {
        let mut targets = Vec::new();
        let is_jump = instruction.is_jmp_short_or_near() || instruction.is_jcc_short_or_near();
        if is_jump || instruction.is_call_near() {
            targets.push(self.behind_jump(instruction.near_branch_target()));
        }
        if instruction.is_ip_rel_memory_operand() {
            let at = instruction.ip_rel_memory_address();
            targets.push(self.linked.get(&at).copied().unwrap_or(Ok(at)));
        }
        targets
    }
}

fn is_allowed(instruction: &Instruction) -> bool {
    let registers = (0..instruction.op_count()).map(|at| instruction.op_register(at));
    let is_plain = |register: Register| {
        !register.is_vector_register() || register.is_xmm() && register.number() < 16
    };
    let mut features = instruction.cpuid_features().iter();
    features.all(|feature| ALLOWED.contains(feature)) && registers.into_iter().all(is_plain)
}

#[test]
fn the_fast_path_uses_no_more_of_the_processor_than_is_kept() {
    let bytes = fs::read(program("libuzswap_agent.so")).unwrap();
    let library = Library::read(&bytes);
    let is_first = |name: &str| name.contains("fast_path") && name.contains("on_call");
    let mut next: Vec<u64> = library
        .functions
        .iter()
        .filter(|(_, (name, _))| is_first(name))
        .map(|(at, _)| *at)
        .collect();
    assert_eq!(next.len(), 1, "the function is there by its name");
    let (mut seen, mut calls) = (BTreeSet::new(), 0);
    while let Some(function) = next.pop() {
        if !seen.insert(function) {
            continue;
        }
        let (name, code) = library.functions[&function];
        for instruction in &mut Decoder::with_ip(64, code, function, DecoderOptions::NONE) {
            let at = instruction.ip();
            assert!(is_allowed(&instruction), "{name}: {instruction:?} at {at:#x}");
            calls += usize::from(instruction.code() == iced_x86::Code::Syscall);
            for target in library.targets(&instruction) {
                let is_end = |name: &str| ENDS.iter().any(|end| name.contains(end));
                match target {
                    Ok(address) => {
                        let to = library.function(address);
                        next.extend(to.filter(|to| !is_end(library.functions[to].0)));
                    }
                    Err(foreign) => assert!(is_end(foreign), "{name} calls {foreign} at {at:#x}"),
                }
            }
        }
    }
    assert!(calls > 0, "the call itself is among what was read");
}
