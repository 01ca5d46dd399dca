//! Keys and signatures of plugins: Ed25519 over a file's bytes.

use ed25519_dalek::{Signer as _, SigningKey};

use crate::load::cache::hex;
use crate::policy::Hex32;

/// The secret key of who signs plugins.
pub struct SecretKey(SigningKey);

impl std::fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the secret key of {}", self.public())
    }
}

impl SecretKey {
    /// A new one.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub fn generate() -> std::io::Result<SecretKey> {
        Ok(SecretKey(SigningKey::from_bytes(&hw_bridge::os::random::bytes()?)))
    }

    /// Reads what [`SecretKey::text`] has written.
    ///
    /// # Errors
    /// It is not 64 hexadecimal digits.
    pub fn parse(text: &str) -> Result<SecretKey, String> {
        Ok(SecretKey(SigningKey::from_bytes(&text.trim().parse::<Hex32>()?.0)))
    }

    /// 64 hexadecimal digits: for a file that nobody else may read.
    pub fn text(&self) -> String {
        hex(self.0.as_bytes())
    }

    /// The public key, as `plugins.signers` of a policy has it.
    pub fn public(&self) -> String {
        hex(self.0.verifying_key().as_bytes())
    }

    /// The signature of a plugin, as `FILE.sig` has it: 128 hexadecimal digits.
    pub fn sign(&self, plugin: &[u8]) -> String {
        hex(&self.0.sign(plugin).to_bytes())
    }
}
