import { KvError, type Log, type LogFields } from "@kv/interface";
import { LOG_LEVELS, type LogLevel } from "./cli-options.js";

/** One line of JSON for each event, from `least` on. */
export function createStderrLog(least: LogLevel, write: (line: string) => void): Log {
  const from = LOG_LEVELS.indexOf(least);
  const at = (level: LogLevel) => {
    if (LOG_LEVELS.indexOf(level) < from) return () => {};
    return (event: string, fields: LogFields = {}) =>
      write(`${JSON.stringify({ time: new Date().toISOString(), level, event, ...fields }, plain)}\n`);
  };
  return { debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error") };
}

/** Errors have no enumerable fields of their own, and a cause may hold anything. */
function plain(_key: string, value: unknown): unknown {
  if (KvError.is(value)) return { code: value.code, message: value.message, hint: value.hint };
  return value instanceof Error ? { name: value.name, message: value.message } : value;
}
