import type { Log, LogFields } from "@kv/interface";
import { printError } from "@kv/program";

const LOG_LEVELS = ["debug", "info", "warn", "error", "silent"] as const;
export type LogLevel = (typeof LOG_LEVELS)[number];

/** Lines of JSON on stderr, because stdout is for results. */
export function jsonLog(level: LogLevel, fixed: LogFields = {}): Log {
  const minimum = LOG_LEVELS.indexOf(level);
  const at = (name: LogLevel) => (event: string, fields?: LogFields) => {
    if (LOG_LEVELS.indexOf(name) < minimum) return;
    printError(`${JSON.stringify({ level: name, event, ...fixed, ...fields })}\n`);
  };
  return { debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error") };
}
