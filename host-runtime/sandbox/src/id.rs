//! Unique ids: the root's address, which a plugin makes and reads, and behind it the group's secret, which it does not (INV-20, INV-21).

use crate::error::Error;
use crate::key::KEY_BYTES;
use crate::limits::{ADDRESS_BYTES, ID_BYTES};

/// Where the secret part of an id ends; it begins behind the root's address.
const SECRET_END: usize = ADDRESS_BYTES + KEY_BYTES;

/// Random bytes for the secret part of an id.
///
/// # Errors
/// [`Error::System`] if the system gives none.
pub fn draw() -> Result<[u8; KEY_BYTES], Error> {
    let what = || "reading random bytes for a unique id".to_string();
    hw_bridge::os::random::bytes().map_err(|source| Error::System { what: what(), source })
}

/// What a plugin answered as an id: an address and zeros (INV-20, INV-21).
///
/// # Errors
/// [`Error::Usage`] for another length, or bytes behind the address: the place of the secret is the host's.
pub fn answered(id: Vec<u8>) -> Result<[u8; ID_BYTES], Error> {
    let len = id.len();
    let id: [u8; ID_BYTES] = id.try_into().map_err(|_| {
        Error::Usage(format!("the plugin answered an id of {len} bytes, {ID_BYTES} are required (INV-20)"))
    })?;
    if let Some(at) = id[ADDRESS_BYTES..].iter().position(|b| *b != 0) {
        return Err(Error::Usage(format!(
            "the plugin answered an id whose byte {} is not zero; it is the root's address in {ADDRESS_BYTES} bytes, and zeros \
             (INV-21): the host puts the group's secret there",
            ADDRESS_BYTES + at
        )));
    }
    Ok(id)
}

/// An id as the program gets it.
pub fn with_secret(mut public: [u8; ID_BYTES], secret: &[u8; KEY_BYTES]) -> [u8; ID_BYTES] {
    public[ADDRESS_BYTES..SECRET_END].copy_from_slice(secret);
    public
}

/// An id as the plugin sees it, without what is behind the address.
pub fn public(id: &[u8; ID_BYTES]) -> [u8; ID_BYTES] {
    let mut public = [0; ID_BYTES];
    public[..ADDRESS_BYTES].copy_from_slice(&id[..ADDRESS_BYTES]);
    public
}

/// The secret part of an id that a program brings.
///
/// # Errors
/// [`Error::Usage`] for one without: nobody could tell its group's members from others.
pub fn secret_of(id: &[u8; ID_BYTES]) -> Result<[u8; KEY_BYTES], Error> {
    let mut secret = [0; KEY_BYTES];
    secret.copy_from_slice(&id[ADDRESS_BYTES..SECRET_END]);
    if secret == [0; KEY_BYTES] {
        return Err(Error::Usage(format!(
            "the unique id has no secret part (bytes {ADDRESS_BYTES} to {}), so no unique_id made it; hand all {ID_BYTES} bytes of \
             one that Runtime::unique_id answered to every rank",
            SECRET_END - 1
        )));
    }
    Ok(secret)
}

/// The port that a `host:port` ends with; 0 where there is none, which the library refuses.
pub fn port_of(root: &str) -> u16 {
    root.rsplit_once(':').and_then(|(_, port)| port.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves INV-20, INV-21.
    #[test]
    fn an_id_has_its_secret_outside_the_plugin_only() {
        let mut plugins = vec![0; ID_BYTES];
        plugins[..ADDRESS_BYTES].fill(0xAB);
        let public_part = answered(plugins.clone()).unwrap();
        let secret = draw().unwrap();
        let id = with_secret(public_part, &secret);
        assert_eq!((secret_of(&id).unwrap(), public(&id)), (secret, public_part));
        let e = secret_of(&public_part).unwrap_err().to_string();
        assert!(e.contains("no secret part (bytes 28 to 59)"), "{e}");
        for at in [28, 59, 60, 127] {
            let mut wrong = plugins.clone();
            wrong[at] = 1;
            let e = answered(wrong).unwrap_err().to_string();
            assert!(e.contains(&format!("whose byte {at} is not zero")), "{e}");
        }
        assert!(answered(vec![0; 127]).unwrap_err().to_string().contains("an id of 127 bytes"));
    }

    #[test]
    fn the_port_of_a_root_is_its_last_part() {
        for (text, port) in
            [("10.0.0.1:4567", 4567), ("[fd00::1%eth0]:80", 80), ("node-1:9", 9), ("node", 0), ("node:x", 0), ("", 0)]
        {
            assert_eq!(port_of(text), port, "{text}");
        }
    }
}
