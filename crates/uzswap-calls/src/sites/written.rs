//! Code that the program writes as it runs. We cannot know where its instructions begin, and the
//! program may write, copy or read the code again. So we do not replace its system calls.

use super::{MOV_BYTES, MOV_EAX, SYSCALL};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};

/// The most bytes between the start of the instruction that sets a call's number and the `syscall`.
/// Six arguments may be set in between.
pub const BEFORE: usize = 64;

/// `mov rax, imm32`, without the number.
const MOV_RAX: [u8; 3] = [0x48, 0xc7, 0xc0];

/// True if code makes a wanted call: a run of instructions begins by setting the call's number, and
/// contains a `syscall`.
pub fn makes_call(code: &[u8], wants: impl Fn(u32) -> bool) -> bool {
    memchr::memmem::find_iter(code, &SYSCALL).any(|at| {
        let before = &code[at.saturating_sub(BEFORE)..at + SYSCALL.len()];
        before.windows(MOV_BYTES).enumerate().any(|(from, mov)| {
            let number = u32::from_le_bytes([mov[1], mov[2], mov[3], mov[4]]);
            let is_mov = mov[0] == MOV_EAX || before[..=from].ends_with(&MOV_RAX);
            let behind = &before[from + MOV_BYTES..];
            is_mov && number < 512 && wants(number) && runs_into_call(behind)
        })
    })
}

/// True if the last instruction of these bytes is `syscall`, and no other instruction jumps.
fn runs_into_call(code: &[u8]) -> bool {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.mnemonic() == Mnemonic::Syscall {
            return !decoder.can_decode();
        }
        if instruction.is_invalid() || instruction.flow_control() != FlowControl::Next {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_found_by_its_number() {
        let is_read = |number| number == 0;
        let mov = [0xb8, 0, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05];
        let mov_long = [0x48, 0xc7, 0xc0, 0, 0, 0, 0, 0x0f, 0x05];
        assert!(makes_call(&mov, is_read) && makes_call(&mov_long, is_read));
        assert!(!makes_call(&mov, |number| number == 1) && !makes_call(&mov[5..], is_read));
        // The two bytes of `syscall` are part of another instruction, or an instruction before them
        // jumps.
        let inside = [&mov[..5], &[0x48, 0xb9, 1, 2], &SYSCALL, &[3, 4, 5, 6]].concat();
        let jump = [&mov[..5], &[0xeb, 0], &SYSCALL[..]].concat();
        assert!(!makes_call(&inside, is_read) && !makes_call(&jump, is_read));
        let far = [&mov[..5], &[0x90; BEFORE], &SYSCALL].concat();
        assert!(!makes_call(&far, is_read));
    }
}
