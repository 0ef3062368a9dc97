//! `uzswap remote`: the clients of a store, and the removal of the dead ones' segments.

use crate::cli::{RemoteArguments, RemoteCommand, StoreArguments};
use crate::error::Failure;
use crate::size;
use crate::stdio::show;
use serde_json::json;
use uzswap_remote::{Address, Admin};

pub fn remote(arguments: &RemoteArguments) -> Result<(), Failure> {
    match &arguments.what {
        RemoteCommand::Status(status) => {
            let clients = admin(&status.store)?.clients()?;
            if status.json {
                let each = clients.iter().map(|one| {
                    json!({ "client": one.client, "epoch": one.epoch, "owner": one.owner,
                        "segments": one.segments, "bytes": one.bytes })
                });
                show!("{:#}", json!(each.collect::<Vec<_>>()));
                return Ok(());
            }
            for one in &clients {
                let owner = match &one.owner {
                    Some(owner) => format!("lives ({owner})"),
                    None => "does not answer; `uzswap remote gc` removes its segments".into(),
                };
                show!(
                    "{} {}: {} in {} segments, {owner}",
                    one.client,
                    one.epoch,
                    size::show(one.bytes),
                    one.segments
                );
            }
            if clients.is_empty() {
                show!("no client has segments there");
            }
        }
        RemoteCommand::Gc(store) => {
            let (segments, bytes) = admin(store)?.remove_dead()?;
            show!("removed {segments} segments of dead clients, {}", size::show(bytes));
        }
    }
    Ok(())
}

fn admin(store: &StoreArguments) -> Result<Admin, Failure> {
    let mut text = store.address.clone();
    if let Some(path) = &store.remote_password_file {
        text.push(if text.contains('?') { '&' } else { '?' });
        text.push_str(&format!("password-file={}", path.display()));
    }
    Ok(Admin::connect(&Address::parse(&text)?)?)
}
