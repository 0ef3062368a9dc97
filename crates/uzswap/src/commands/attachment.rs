//! The attaching of `uzswap top`: the question for a limit, and the `uzswap attach` processes.
//! Dropping the value ends these processes.

use crate::device::processes::OWN_PROGRAM;
use ratatui::crossterm::event::KeyCode;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use uzswap_sys::process;

/// The open question, and the processes that attach.
#[derive(Default)]
pub struct Attachment {
    /// The process to limit, its name, and the text typed so far.
    asked: Option<(i32, String, String)>,
    attached: Vec<(i32, Child)>,
}

impl Attachment {
    /// Asks for the limit of a process.
    pub fn begin(&mut self, pid: i32, name: &str) {
        self.asked = Some((pid, name.to_owned(), String::new()));
    }

    /// The question, if one is open.
    pub fn prompt(&self) -> Option<String> {
        let (pid, name, typed) = self.asked.as_ref()?;
        Some(format!("memory for {name} ({pid}), as in 300M: {typed}_   Enter, Esc"))
    }

    /// Handles a pressed key while the question is open. Returns a message for the user, or an
    /// empty text.
    pub fn press(&mut self, key: KeyCode) -> String {
        let Some((pid, name, typed)) = &mut self.asked else { return String::new() };
        match key {
            KeyCode::Char(letter) => typed.push(letter),
            KeyCode::Backspace => {
                typed.pop();
            }
            KeyCode::Enter => {
                let (pid, said) = (*pid, format!("{name} is limited to {typed} until top ends"));
                let started = start(pid, typed);
                self.asked = None;
                return match started {
                    Ok(child) => {
                        self.attached.push((pid, child));
                        said
                    }
                    Err(error) => format!("cannot start uzswap attach: {error}"),
                };
            }
            KeyCode::Esc => self.asked = None,
            _ => {}
        }
        String::new()
    }

    /// Returns the message of an `attach` that has ended since the last call.
    pub fn look(&mut self) -> Option<String> {
        let is_over = |(_, child): &mut (i32, Child)| matches!(child.try_wait(), Ok(Some(_)));
        let (pid, mut child) = self.attached.extract_if(.., is_over).next()?;
        let mut said = String::new();
        // An error means that its message cannot be read or shown.
        child.stderr.take()?.read_to_string(&mut said).ok();
        let last = said.lines().last().unwrap_or("it has ended");
        Some(format!("process {pid}: {}", last.trim_start_matches("uzswap: ")))
    }
}

fn start(pid: i32, memory: &str) -> std::io::Result<Child> {
    Command::new(OWN_PROGRAM)
        .args(["attach", "--quiet", &format!("--pid={pid}"), &format!("--memory={memory}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
}

impl Drop for Attachment {
    fn drop(&mut self) {
        for (_, child) in &mut self.attached {
            // An error means that the process has ended.
            let _ = process::kill(child.id() as i32, libc::SIGTERM);
            let _ = child.wait();
        }
    }
}
