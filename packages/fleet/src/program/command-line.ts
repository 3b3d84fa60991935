import { isObject } from "@kv/http";
import { commanderOutput, each, packageVersion, port, wholeNumber } from "@kv/program";
import { Command, Option } from "commander";
import { z } from "zod";
import { parseSettings, readJsonFile } from "../settings/fleet-settings.js";
import { type Setting, settingsIn, withoutDefault } from "../settings/settings-table.js";

/** A program whose flags follow from two schemas: of its configuration file, and of flags alone. */
export interface CommandLine<File extends z.ZodObject, Flags extends z.ZodObject> {
  readonly name: string;
  readonly description: string;
  /** `import.meta.url` of a module in the program's package. */
  readonly module: string;
  readonly readme: string;
  readonly file: File;
  readonly flags: Flags;
}

export interface Given<File extends z.ZodObject, Flags extends z.ZodObject> {
  readonly given: z.input<File>;
  readonly inFile: z.input<File>;
  readonly flags: z.output<Flags>;
}

/** The command with its flags and their help. */
export function createCommand<File extends z.ZodObject, Flags extends z.ZodObject>(
  program: CommandLine<File, Flags>,
): Command {
  const command = new Command(program.name)
    .version(packageVersion(program.module))
    .description(program.description)
    .exitOverride()
    .configureOutput(commanderOutput(program.name))
    .configureHelp({ minWidthToWrap: 20 })
    .helpCommand(true)
    .allowExcessArguments(false);
  const [settings, flags] = [settingsIn(program.file), settingsIn(program.flags)];
  const headings = [...settings, ...flags].map(({ heading }) => heading);
  const placeOf = ({ heading }: Setting) => headings.indexOf(heading);
  for (const one of [...flags, ...settings].sort((a, b) => placeOf(a) - placeOf(b)))
    if (one.flag !== undefined) command.addOption(optionOf(one.flag, one));
  return command;
}

function optionOf(flag: string, { description, heading, type, choices, usual }: Setting): Option {
  const isShown = usual !== undefined && usual !== "false";
  const option = new Option(flag, isShown ? `${description} (default: ${usual})` : description);
  if (heading !== undefined) option.helpGroup(`${heading}:`);
  if (option.optional) option.preset("true");
  if (choices !== undefined) option.choices(choices);
  const value = type instanceof z.ZodArray ? withoutDefault(type.element) : type;
  if (!(value instanceof z.ZodNumber)) return option;
  const read = value.maxValue === 65_535 ? port : wholeNumber;
  return option.variadic ? option.argParser(each(read)) : option.argParser(read);
}

/**
 * Parses the arguments after the program's name, and the file of `--config`.
 *
 * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`, with the file's name. commander exits for
 * an unknown flag.
 */
export function readCommandLine<File extends z.ZodObject, Flags extends z.ZodObject>(
  program: CommandLine<File, Flags>,
  args: readonly string[],
  readFile: (path: string) => string,
  command = createCommand(program),
): Given<File, Flags> {
  const values = command.parse([...args], { from: "user" }).opts();
  const given = (schema: z.ZodObject) => {
    let all = {};
    for (const { flag, path, type } of settingsIn(schema)) {
      const value = flag === undefined ? undefined : values[new Option(flag).attributeName()];
      if (value === undefined) continue;
      // A flag without a value means an object with its defaults.
      const inner: unknown = type instanceof z.ZodObject ? {} : value;
      all = merged(all, path.reduceRight((member, name) => ({ [name]: member }), inner) as object);
    }
    return all;
  };
  return {
    given: given(program.file) as z.input<File>,
    inFile:
      values["config"] === undefined
        ? ({} as z.input<File>)
        : readConfigFile(program, values["config"], readFile),
    flags: program.flags.parse(given(program.flags)),
  };
}

/**
 * Reads a configuration file.
 *
 * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`, with the file's name.
 */
export function readConfigFile<File extends z.ZodObject>(
  { file, readme }: Pick<CommandLine<File, z.ZodObject>, "file" | "readme">,
  path: string,
  readFile: (path: string) => string,
): z.input<File> {
  const input = readJsonFile(path, readFile);
  parseSettings(file, input, { subject: `${path} is`, readme });
  const { $schema: _, ...settings } = input as z.input<File>;
  return settings as z.input<File>;
}

/** Puts defined members of `over` over those of `under`, recursively; lists are replaced. */
export function merged<Under extends object, Over extends object>(
  under: Under,
  over: Over,
): Under & Over {
  const all = { ...under } as Record<string, unknown>;
  for (const [key, value] of Object.entries(over)) {
    const before = all[key];
    if (isObject(value)) all[key] = merged(isObject(before) ? before : {}, value);
    else if (value !== undefined) all[key] = value;
  }
  return all as Under & Over;
}
