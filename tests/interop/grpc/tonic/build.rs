// SPDX-License-Identifier: Apache-2.0
// PROTO_KVRELAY and PROTO_TESTING name the files.
use std::{env, error::Error, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    for name in ["PROTO_KVRELAY", "PROTO_TESTING"] {
        println!("cargo:rerun-if-env-changed={name}");
        let file = PathBuf::from(env::var(name)?);
        let folder = file.parent().ok_or("no folder")?.to_owned();
        println!("cargo:rerun-if-changed={}", file.display());
        tonic_prost_build::configure().build_server(false).compile_protos(&[file], &[folder])?;
    }
    Ok(())
}
