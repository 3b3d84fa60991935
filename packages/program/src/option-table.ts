import type { Command } from "commander";
import {
  count,
  duration,
  each,
  hostAndPort,
  httpUrl,
  listOf,
  number,
  oneOf,
  port,
  positiveNumber,
  share,
  size,
  wholeNumber,
  wholeNumberFrom,
} from "./flag-values.js";

/** An option in a program's table of them (`options.json`). */
export interface OptionRow {
  readonly flags: string;
  readonly description: string;
  /** The name of the function that reads the value; without one, the value is text. */
  readonly value?: string;
  /** `list`: values separated by commas; `each`: the flag may be given several times. */
  readonly many?: string;
  readonly choices?: readonly string[];
  /** Whether upper and lower case of `choices` are the same. @default false */
  readonly anyCase?: boolean;
  /** The smallest and the largest whole number. */
  readonly range?: readonly number[];
  /** Text with a `value` is read as if it were given. */
  readonly default?: unknown;
  /** @default false */
  readonly isRequired?: boolean;
}

/** An option, a heading of the help ("Limits:"), or the name of rows that commands share. */
export type TableRow = OptionRow | string;

/** Reads the value of an option. */
export type ValueReader = (text: string) => unknown;

const READERS: Readonly<Record<string, ValueReader>> = {
  count,
  duration,
  hostAndPort,
  httpUrl,
  number,
  port,
  positiveNumber,
  share,
  size,
  text: String,
  wholeNumber,
};

/** The commands of a program, as it has them in `options.json`. */
export interface CommandTable {
  /** Rows that commands share, by the name that stands in their place. */
  readonly shared: Readonly<Record<string, readonly OptionRow[]>>;
  readonly commands: Readonly<
    Record<string, { readonly description: string; readonly options: readonly TableRow[] }>
  >;
}

/** Adds a command of a table. `readers`: of the program's own kinds of values, by name. */
export function addCommand(
  program: Command,
  name: string,
  { shared, commands }: CommandTable,
  readers: Readonly<Record<string, ValueReader>> = {},
): Command {
  const { description = "", options = [] } = commands[name] ?? {};
  const command = program.command(name).description(description);
  for (const row of options) {
    if (typeof row === "object") addOptions(command, [row], readers);
    else if (row.endsWith(":")) command.optionsGroup(row);
    else addOptions(command, shared[row] ?? [], readers);
  }
  return command;
}

/** Adds options of a table to a command, and returns it. */
export function addOptions(
  command: Command,
  rows: readonly OptionRow[],
  readers: Readonly<Record<string, ValueReader>> = {},
): Command {
  for (const row of rows) {
    const { flags, description, value, choices, default: usual, isRequired = false } = row;
    const option = command.createOption(flags, description).makeOptionMandatory(isRequired);
    const read = readerOf(row, { ...READERS, ...readers });
    if (choices !== undefined) option.choices(choices);
    if (read !== undefined) option.argParser(read);
    if (typeof usual === "string" && value !== undefined) option.default(read?.(usual), usual);
    else if (usual !== undefined) option.default(usual);
    command.addOption(option);
  }
  return command;
}

function readerOf(
  { value = "", many, choices, anyCase, range }: OptionRow,
  readers: Readonly<Record<string, ValueReader>>,
): ValueReader | undefined {
  const [least, most] = range ?? [];
  if (least !== undefined && most !== undefined) return wholeNumberFrom(least, most);
  if (choices !== undefined) return anyCase ? oneOf(...choices) : undefined;
  const read = readers[value];
  if (read === undefined) return undefined;
  if (many === "list") return listOf(read);
  return many === "each" ? each(read) : read;
}
