import { readFileSync, type Stats, statSync } from "node:fs";
import { type Clock, KvError, type Log } from "@kv/interface";
import { type CurveKeys, curveKeysOf } from "./zmtp/curve.js";

const MIN_BYTES = 16;
const MAX_BYTES = 4096;
const CHECK_INTERVAL_MS = 1000;
/** Mode bits of the group and others. */
const NOT_ONLY_OWNER = 0o066;

/**
 * A key file's one or two keys, a line each. Requests use the first, listeners accept both, so that
 * workers can change keys one after another. An unusable new file changes nothing.
 */
export class HandshakeKeys {
  readonly #name: string;
  readonly #file: string;
  #keys: readonly Uint8Array[];
  #stats: Stats;
  #isModeKnown = false;
  #checkedAtMs = Number.NEGATIVE_INFINITY;

  /**
   * `name`: the setting's, for errors.
   *
   * @throws `KV_CONFIG_INVALID` when the file cannot be read or does not hold one or two keys.
   */
  constructor(name: string, file: string) {
    this.#name = name;
    this.#file = file;
    this.#stats = statsOf(name, file);
    this.#keys = readKeys(name, file);
  }

  /** The valid keys, at least one. Looks at the file at most once a second. */
  current(clock: Clock, log: Log): readonly Uint8Array[] {
    const nowMs = clock.now();
    if (nowMs < this.#checkedAtMs + CHECK_INTERVAL_MS) return this.#keys;
    this.#checkedAtMs = nowMs;
    try {
      const before = this.#stats;
      const stats = statsOf(this.#name, this.#file);
      if (stats.mode !== before.mode || !this.#isModeKnown) this.#warnOfMode(stats, log);
      this.#isModeKnown = true;
      if (
        stats.mtimeMs === before.mtimeMs &&
        stats.size === before.size &&
        stats.ino === before.ino
      ) {
        this.#stats = stats;
        return this.#keys;
      }
      this.#keys = readKeys(this.#name, this.#file);
      this.#stats = stats;
      log.info("handshake-key-changed", { file: this.#file, keys: this.#keys.length });
    } catch (error) {
      log.warn("handshake-key-not-read", {
        file: this.#file,
        error: String(error),
        kept: this.#keys.length,
      });
    }
    return this.#keys;
  }

  #warnOfMode({ mode }: Stats, log: Log): void {
    if ((mode & NOT_ONLY_OWNER) === 0) return;
    log.warn("handshake-key-exposed", {
      file: this.#file,
      mode: (mode & 0o777).toString(8),
      hint: `the file's group or others can read or change the key: chmod 600 ${this.#file}`,
    });
  }
}

/**
 * The keys of a setting's file. They are in a file because configurations are logged and command
 * lines are visible to other users.
 *
 * @throws `KV_CONFIG_INVALID` with the setting's name.
 */
export function readHandshakeKeys(name: string, file: unknown): HandshakeKeys | undefined {
  if (file === undefined || file === null) return undefined;
  if (typeof file !== "string" || file === "")
    throw invalid(name, `is ${JSON.stringify(file)}, not the path of a file`);
  return new HandshakeKeys(name, file);
}

function statsOf(name: string, file: string): Stats {
  try {
    return statSync(file);
  } catch (error) {
    throw unreadable(name, file, error);
  }
}

function readKeys(name: string, file: string): readonly Uint8Array[] {
  let lines: string[];
  try {
    lines = readFileSync(file, "latin1").split("\n");
  } catch (error) {
    throw unreadable(name, file, error);
  }
  const keys = lines.map((line) => line.trimEnd()).filter((line) => line !== "");
  if (keys.length === 0 || keys.length > 2)
    throw invalid(name, `is ${file}, which holds ${keys.length} keys, not one or two`);
  for (const { length } of keys) {
    if (length >= MIN_BYTES && length <= MAX_BYTES) continue;
    throw invalid(
      name,
      `is ${file}, which holds a key of ${length} bytes, not ${MIN_BYTES} to ${MAX_BYTES}`,
    );
  }
  return keys.map((key) => Buffer.from(key, "latin1"));
}

function unreadable(name: string, file: string, error: unknown): KvError {
  return invalid(name, `is ${file}, which cannot be read: ${(error as Error).message}`);
}

function invalid(name: string, why: string): KvError {
  return new KvError("KV_CONFIG_INVALID", `${name} ${why}`, {
    hint: "make one for both sides: (umask 077; head -c 32 /dev/urandom | base64 > key)",
    details: { key: name },
  });
}

/** The valid key pairs: listeners accept each, requests use the first. Undefined: NULL. */
export type CurveKeySource = (() => readonly CurveKeys[]) | undefined;

/** Derives the pairs again when the shared keys change. */
export function curveKeysFrom(keys: () => readonly Uint8Array[]): () => readonly CurveKeys[] {
  let from: readonly Uint8Array[] | undefined;
  let derived: readonly CurveKeys[] = [];
  return () => {
    const current = keys();
    if (current !== from) {
      derived = current.map(curveKeysOf);
      from = current;
    }
    return derived;
  };
}

export const CURVE_HINT =
  "give both sides the same key, or neither: handshake_key_file in kv_connector_extra_config of an engine, --handshake-key-file of kv-peer, kv-proxy and kv-epp; vLLM has no key";

/** libzmq ends such a connection before its own greeting is complete. */
export const OTHER_MECHANISM =
  "it ended the connection when it saw this side's security mechanism CURVE, as a peer with NULL does";

export function isAboutCurve(error: unknown): boolean {
  return KvError.is(error, "KV_HANDSHAKE_UNTRUSTED");
}
