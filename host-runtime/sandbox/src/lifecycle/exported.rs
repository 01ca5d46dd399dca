//! The plan that an instance exported, on its way to another one: with the name and the number of its schema, and a checksum.
//!
//! What is in it is the guest's allegation. That it is what was exported, is no larger than a plan may be, and is meant for who
//! is to read it, is checked here, before that one sees a byte.

use sha2::{Digest, Sha256};

use crate::bindings::exports::neuron::lifecycle::lifecycle::Description;
use crate::text::line;

/// A plan that was exported.
#[derive(Debug)]
pub struct Exported {
    name: String,
    schema: u32,
    state: Vec<u8>,
    sum: [u8; 32],
}

impl Exported {
    /// What a plugin handed out that describes itself as `writer`.
    pub(crate) fn seal(writer: &Description, state: Vec<u8>) -> Exported {
        let (name, schema, sum) = (writer.schema_name.clone(), writer.state_schema, Sha256::digest(&state).into());
        Exported { name, schema, state, sum }
    }

    /// The schema and the bytes, of which at most `most` may be, for a plugin that describes itself as `reader`.
    ///
    /// # Errors
    /// A sentence: too large, not what was exported, of another schema.
    pub(crate) fn open(&self, reader: &Description, most: usize) -> Result<(u32, &[u8]), String> {
        let bytes = self.state.len();
        if bytes > most {
            return Err(format!("a plan of {bytes} bytes was to be imported, {most} are allowed"));
        }
        if *Sha256::digest(&self.state) != self.sum {
            return Err(format!("the plan of {bytes} bytes is not the one that was exported: its SHA-256 differs"));
        }
        fits(&self.name, self.schema, reader)?;
        Ok((self.schema, &self.state))
    }
}

/// Whether a plugin reads a schema.
///
/// # Errors
/// A sentence with what is written and what is read.
pub fn fits(name: &str, schema: u32, reader: &Description) -> Result<(), String> {
    let (reads_name, reads) = (&reader.schema_name, &reader.reads_schemas);
    if name == reads_name && reads.contains(&schema) {
        return Ok(());
    }
    let (name, reads_name) = (line(name), line(reads_name));
    Err(format!("the old plugin writes state of schema `{name}` {schema}, the new one reads `{reads_name}` {reads:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(schema_name: &str, state_schema: u32, reads_schemas: &[u32]) -> Description {
        let (name, version, wire_compat) = Default::default();
        let (schema_name, reads_schemas) = (schema_name.into(), reads_schemas.into());
        Description { name, version, wire_compat, state_schema, reads_schemas, schema_name }
    }

    #[test]
    fn a_plan_comes_to_who_reads_it_as_it_was_exported() {
        let writer = plugin("plan", 2, &[2]);
        let sealed = || Exported::seal(&writer, b"rings".to_vec());
        assert_eq!(sealed().open(&plugin("plan", 3, &[2, 3]), 5), Ok((2, &b"rings"[..])));
        let refused = |e: &Exported, reader: &Description, most: usize| e.open(reader, most).unwrap_err();
        assert_eq!(refused(&sealed(), &writer, 4), "a plan of 5 bytes was to be imported, 4 are allowed");
        for (reader, reads) in [(plugin("plan", 3, &[3]), "`plan` [3]"), (plugin("other", 2, &[2]), "`other` [2]")] {
            let why = format!("the old plugin writes state of schema `plan` 2, the new one reads {reads}");
            assert_eq!(refused(&sealed(), &reader, 5), why);
        }
        let forged = plugin("plan\nERROR\u{2028}", 3, &[3]);
        assert!(refused(&sealed(), &forged, 5).ends_with("the new one reads `plan ERROR ` [3]"));
        let longer = |e: &mut Exported| e.state.push(0);
        let damages: [fn(&mut Exported); 4] =
            [|e| e.state[4] ^= 1, |e| e.state.truncate(4), |e| e.sum[31] ^= 1, |e| e.state.clear()];
        for damage in damages.into_iter().chain([longer as fn(&mut Exported)]) {
            let mut e = sealed();
            damage(&mut e);
            assert!(refused(&e, &writer, 9).contains("is not the one that was exported: its SHA-256 differs"));
        }
    }
}
