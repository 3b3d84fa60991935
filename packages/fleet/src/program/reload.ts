import { isDeepStrictEqual } from "node:util";
import { isObject } from "@kv/http";
import type { JsonLog, LogLevel } from "../telemetry/json-log.js";

/** What a command line and its file say. */
interface ProgramOptions {
  readonly logLevel: LogLevel;
  readonly settings: object;
}

/** Options of `reloadAtHangup`. */
export interface ReloadOptions<O extends ProgramOptions> {
  readonly log: JsonLog;
  /** Those of the start. */
  readonly options: O;
  /** Reads the command line and its file again. */
  readonly parse: () => O;
  readonly reload: (options: O) => Reloaded | Promise<Reloaded>;
}

/**
 * Reads the configuration again at each SIGHUP, and logs what changed and what needs a restart. A
 * wrong file changes nothing.
 */
export function reloadAtHangup<O extends ProgramOptions>({
  log,
  options,
  parse,
  reload,
}: ReloadOptions<O>): void {
  let level = options.logLevel;
  const { logLevel: _, settings: __, ...atStart } = options;
  let turn = Promise.resolve();
  const once = async () => {
    try {
      const next = parse();
      const { changed, needRestart } = await reload(next);
      const { logLevel, settings: ___, ...program } = next;
      const more = reloadedSettings(atStart, program, () => false).needRestart;
      const levels = logLevel === level ? [] : ["logLevel"];
      level = logLevel;
      log.setLevel(logLevel);
      log.info("reloaded", {
        changed: [...levels, ...changed],
        need_restart: [...more, ...needRestart],
      });
    } catch (error) {
      log.error("not-reloaded", { error });
    }
  };
  process.on("SIGHUP", () => {
    turn = turn.then(once);
  });
}

/** What a front end did with settings that it was given again. */
export interface Reloaded {
  /** Settings that changed and take effect, such as `limits.bodyLengthBytes`. */
  readonly changed: readonly string[];
  /** Settings that changed and take effect only after a restart. */
  readonly needRestart: readonly string[];
}

/**
 * Compares settings member by member. `takesEffect`: whether a changed one does without a restart.
 */
export function reloadedSettings(
  before: object,
  after: object,
  takesEffect: (name: string) => boolean,
): Reloaded {
  const names = changedNames(before, after, "");
  return {
    changed: names.filter(takesEffect),
    needRestart: names.filter((name) => !takesEffect(name)),
  };
}

function changedNames(before: object, after: object, prefix: string): string[] {
  const members = (of: object) => of as Readonly<Record<string, unknown>>;
  return [...new Set([...Object.keys(before), ...Object.keys(after)])].flatMap((name) => {
    const [old, now] = [members(before)[name], members(after)[name]];
    if (isDeepStrictEqual(old, now)) return [];
    return isObject(old) && isObject(now)
      ? changedNames(old, now, `${prefix}${name}.`)
      : [prefix + name];
  });
}
