import { readFileSync, statSync } from "node:fs";
import { type Clock, KvError, type Log } from "@kv/interface";

const NAME = "kv_connector_extra_config.handshake_key_file";
const MIN_BYTES = 16;
const MAX_BYTES = 4096;
/** How often the file is looked at, at most. */
const CHECK_INTERVAL_MS = 1000;

/**
 * The keys of `handshake_key_file`. The file has one key a line, two at most: the first signs, both are accepted, so that the key can be
 * changed on one worker after the other. The file is read again when it has changed; one that is not usable leaves the keys as they are.
 */
export class HandshakeKeys {
  readonly #file: string;
  #keys: readonly Uint8Array[];
  #version: string;
  #checkedAtMs = Number.NEGATIVE_INFINITY;

  /** Errors: `KV_CONFIG_INVALID` when the file cannot be read or does not hold one or two keys. */
  constructor(file: string) {
    this.#file = file;
    this.#version = versionOf(file);
    this.#keys = readKeys(file);
  }

  /** The keys that are valid now; the first one signs. At most once a second, looks whether the file has changed. Throws nothing. */
  current(clock: Clock, log: Log): readonly Uint8Array[] {
    const nowMs = clock.now();
    if (nowMs < this.#checkedAtMs + CHECK_INTERVAL_MS) return this.#keys;
    this.#checkedAtMs = nowMs;
    try {
      const version = versionOf(this.#file);
      if (version === this.#version) return this.#keys;
      this.#keys = readKeys(this.#file);
      this.#version = version;
      log.info("handshake-key-changed", { file: this.#file, keys: this.#keys.length });
    } catch (error) {
      log.warn("handshake-key-not-read", { file: this.#file, error: String(error), kept: this.#keys.length });
    }
    return this.#keys;
  }
}

/**
 * Reads the keys that sign handshakes from the file that `handshake_key_file` names. The keys are in a file because configurations are logged
 * and other users can see command lines. Undefined when the setting is absent. Errors: `KV_CONFIG_INVALID`.
 */
export function readHandshakeKeys(extra: Readonly<Record<string, unknown>>): HandshakeKeys | undefined {
  const { handshake_key_file: file } = extra;
  if (file === undefined || file === null) return undefined;
  if (typeof file !== "string" || file === "")
    throw invalid(`is ${JSON.stringify(file)}, not the path of a file`);
  return new HandshakeKeys(file);
}

function versionOf(file: string): string {
  try {
    const { mtimeMs, size, ino } = statSync(file);
    return `${mtimeMs} ${size} ${ino}`;
  } catch (error) {
    throw unreadable(file, error);
  }
}

function readKeys(file: string): readonly Uint8Array[] {
  let lines: string[];
  try {
    lines = readFileSync(file, "latin1").split("\n");
  } catch (error) {
    throw unreadable(file, error);
  }
  const keys = lines.map((line) => line.trimEnd()).filter((line) => line !== "");
  if (keys.length === 0 || keys.length > 2)
    throw invalid(`is ${file}, which holds ${keys.length} keys, not one or two`);
  for (const { length } of keys) {
    if (length >= MIN_BYTES && length <= MAX_BYTES) continue;
    throw invalid(`is ${file}, which holds a key of ${length} bytes, not ${MIN_BYTES} to ${MAX_BYTES}`);
  }
  return keys.map((key) => Buffer.from(key, "latin1"));
}

function unreadable(file: string, error: unknown): KvError {
  return invalid(`is ${file}, which cannot be read: ${(error as Error).message}`);
}

function invalid(why: string): KvError {
  return new KvError("KV_CONFIG_INVALID", `${NAME} ${why}`, {
    hint: "make one for both sides: head -c 32 /dev/urandom | base64 > key",
    details: { key: NAME },
  });
}
