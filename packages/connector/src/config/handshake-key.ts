import { readFileSync } from "node:fs";
import { KvError } from "@kv/interface";

const NAME = "kv_connector_extra_config.handshake_key_file";
const MIN_BYTES = 16;
const MAX_BYTES = 4096;

/**
 * Reads the key that signs handshakes from the file that `handshake_key_file` names, without trailing white space. The key is in a file
 * because configurations are logged and other users can see command lines. Undefined when the setting is absent. Errors: `KV_CONFIG_INVALID`.
 */
export function readHandshakeKey(extra: Readonly<Record<string, unknown>>): Uint8Array | undefined {
  const { handshake_key_file: file } = extra;
  if (file === undefined || file === null) return undefined;
  if (typeof file !== "string" || file === "")
    throw invalid(`is ${JSON.stringify(file)}, not the path of a file`);
  let text: string;
  try {
    text = readFileSync(file, "latin1").trimEnd();
  } catch (error) {
    throw invalid(`is ${file}, which cannot be read: ${(error as Error).message}`);
  }
  if (text.length < MIN_BYTES || text.length > MAX_BYTES) {
    throw invalid(`is ${file}, which holds ${text.length} bytes, not ${MIN_BYTES} to ${MAX_BYTES}`);
  }
  return Buffer.from(text, "latin1");
}

function invalid(why: string): KvError {
  return new KvError("KV_CONFIG_INVALID", `${NAME} ${why}`, {
    hint: "make one for both sides: head -c 32 /dev/urandom | base64 > key",
    details: { key: NAME },
  });
}
