import { readFileSync, type Stats, statSync } from "node:fs";
import { type Clock, KvError, type Log } from "@kv/interface";

const MIN_BYTES = 16;
const MAX_BYTES = 4096;
/** How often the file is looked at, at most. */
const CHECK_INTERVAL_MS = 1000;
/** The bits of a file's mode that let its group and others read or write it. */
const NOT_ONLY_OWNER = 0o066;

/**
 * The keys of a key file. The file has one key a line, two at most: requests use the first,
 * listeners accept both, so that the key can be changed on one worker after the other. The file is
 * read again when it has changed; one that is not usable leaves the keys as they are.
 */
export class HandshakeKeys {
  readonly #name: string;
  readonly #file: string;
  #keys: readonly Uint8Array[];
  #stats: Stats;
  #isModeKnown = false;
  #checkedAtMs = Number.NEGATIVE_INFINITY;

  /**
   * `name` is that of the setting, for errors.
   *
   * @throws `KV_CONFIG_INVALID` when the file cannot be read or does not hold one or two keys.
   */
  constructor(name: string, file: string) {
    this.#name = name;
    this.#file = file;
    this.#stats = statsOf(name, file);
    this.#keys = readKeys(name, file);
  }

  /**
   * The keys that are valid now, at least one. At most once a second, looks whether the file has
   * changed.
   */
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
 * The keys of the file that a setting names, if it is set. The keys are in a file because
 * configurations are logged and other users can see command lines.
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
