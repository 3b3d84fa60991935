import { z } from "zod";

interface About {
  readonly description: string;
  readonly flag?: string | undefined;
  readonly heading?: string | undefined;
  /** With its unit; undefined if nothing holds without a value. */
  readonly usual?: string | undefined;
}

/** A setting, or a flag that is no setting. */
export interface Setting extends About {
  /** Such as `["limits", "connections"]`. */
  readonly path: readonly string[];
  readonly type: z.core.$ZodType;
  /** Of the value, or of a list's elements; undefined if others are allowed. */
  readonly choices?: readonly string[] | undefined;
}

/** Commands, their help, JSON schemas and READMEs follow from this table. */
const table = z.registry<About>();

/**
 * Adds a setting, or a flag that is no setting, by its line of help:
 * `FLAG: what it sets (default: what holds without it)`. Settings of files alone have no flag. The
 * schema's default is not repeated.
 */
export function setting<S extends z.ZodType>(schema: S) {
  return (text: TemplateStringsArray, ...values: readonly (string | number)[]): S => {
    const line = String.raw({ raw: text }, ...values).replaceAll(/\s+/g, " ");
    const [, flag, description = line, usual] =
      /^(?:(--?[a-z].*?): )?(.*?)(?: \(default: (.*)\))?$/.exec(line) ?? [];
    const described = schema.describe(description);
    table.add(described, { description, flag, usual });
    return described;
  };
}

/** Gives flags, also nested ones, a heading in the help. */
export function group<Shape extends z.ZodRawShape>(heading: string, shape: Shape): Shape {
  for (const member of Object.values(shape))
    table.add(member, { description: "", ...table.get(member), heading });
  return shape;
}

/** A positive whole number, as a zod schema. */
export const count = z.number().int().positive();
/** A listener's port, as a zod schema; 0 takes a free one. */
export const listenerPort = z.number().int().min(0).max(65_535);
/** A header's name, as a zod schema. */
export const headerName = z.string().regex(/^[A-Za-z0-9-]+$/);
const file = z.string().min(1);
/** A certificate that is made, or PEM files, as a zod schema. */
export const tlsFiles = z.union([z.boolean(), z.strictObject({ certFile: file, keyFile: file })]);
/** A setting in milliseconds, with its default. */
export const ms = (usual: number) => setting(z.number().positive().max(86_400_000).default(usual));
/** A number of things or bytes, with its default. */
export const counted = (usual: number) => setting(count.default(usual));

/** Limits of a body's values, as members of a zod schema. */
export const jsonLimits = {
  bodyDepth: counted(100)`objects and lists inside of one another, in a body`,
  bodyMembers: counted(100_000)`members of objects, and objects and lists, in a body`,
  bodyValues: counted(
    2 ** 21,
  )`elements of lists and members of objects, such as token ids, in a body`,
};

/**
 * The settings of a schema. An object counts if it has a flag, and its members if they are
 * settings.
 */
export function settingsIn(
  schema: z.ZodObject,
  path: readonly string[] = [],
  outer?: string,
): Setting[] {
  return Object.entries(schema.shape).flatMap(([name, member]) => {
    const about = table.get(member);
    if (about === undefined) return [];
    const type = withoutDefault(member);
    const { heading = outer, usual = shownDefault(name, member) } = about;
    const element = type instanceof z.ZodArray ? withoutDefault(type.element) : type;
    const choices = element instanceof z.ZodEnum ? element.options.map(String) : undefined;
    const own = { ...about, path: [...path, name], type, choices, heading, usual };
    const inner = type instanceof z.ZodObject ? settingsIn(type, own.path, heading) : [];
    return inner.length === 0 || about.flag !== undefined ? [own, ...inner] : inner;
  });
}

/** The schema of a value that is given, without its default. */
export function withoutDefault(schema: z.core.$ZodType): z.core.$ZodType {
  if (schema instanceof z.ZodPipe) return withoutDefault(schema.in);
  const isWrapped =
    schema instanceof z.ZodOptional ||
    schema instanceof z.ZodDefault ||
    schema instanceof z.ZodPrefault;
  return isWrapped ? withoutDefault(schema.unwrap()) : schema;
}

function shownDefault(name: string, schema: z.core.$ZodType): string | undefined {
  const value = schema instanceof z.ZodDefault ? schema.def.defaultValue : "";
  if (typeof value !== "number") return `${value}` || undefined;
  if (name.endsWith("Ms")) return `${value / 1000} s`;
  if (!name.endsWith("Bytes")) return value < 10_000 ? `${value}` : value.toLocaleString("en-US");
  return value < 2 ** 20 ? `${value / 2 ** 10} KiB` : `${value / 2 ** 20} MiB`;
}
