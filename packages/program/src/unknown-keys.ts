import { nearestName } from "@kv/interface";
import type { z } from "zod";

const MOST_KEYS = 3;

/**
 * An error map for zod's `safeParse`: an unknown key of a strict object names the nearest known one,
 * at its level or, as `limits.connections`, further inside.
 */
export function unknownKeys(issue: z.core.$ZodRawIssue): string | undefined {
  if (issue.code === "invalid_union")
    return issue.errors.flat().find(({ code }) => code === "unrecognized_keys")?.message;
  if (issue.code !== "unrecognized_keys") return undefined;
  const known = keysOf(issue.inst as z.core.$ZodType | undefined);
  const shown = issue.keys.slice(0, MOST_KEYS).map((key) => {
    const nearest = nearestName(key, Array.from(known.keys()));
    const meant = nearest === undefined ? "" : `, did you mean ${known.get(nearest)}?`;
    return `there is no key ${JSON.stringify(key.slice(0, 100))}${meant}`;
  });
  const more = issue.keys.length - shown.length;
  return shown.join("; ") + (more > 0 ? `; and ${more} more` : "");
}

/** Paths by their last key; the outermost wins. */
function keysOf(schema: z.core.$ZodType | undefined): Map<string, string> {
  const paths = new Map<string, string>();
  let level: [string, z.core.$ZodType][] = schema === undefined ? [] : [["", schema]];
  while (level.length > 0) {
    const inner = level.flatMap(([path, each]) =>
      Object.entries(shapeOf(each)).map(([key, member]): [string, z.core.$ZodType] => {
        const at = path === "" ? key : `${path}.${key}`;
        if (!paths.has(key)) paths.set(key, at);
        return [at, member];
      }),
    );
    level = inner;
  }
  return paths;
}

interface Definition {
  readonly innerType?: z.core.$ZodType;
  readonly shape?: Readonly<Record<string, z.core.$ZodType>>;
}

function shapeOf(schema: z.core.$ZodType): NonNullable<Definition["shape"]> {
  const { innerType, shape } = schema._zod.def as Definition;
  return innerType === undefined ? (shape ?? {}) : shapeOf(innerType);
}
