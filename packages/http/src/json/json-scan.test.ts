import { KvError } from "@kv/interface";
import fc from "fast-check";
import { expect, test } from "vitest";
import { type JsonLimits, JsonScan, TOP_LEVEL_MEMBERS } from "./json-reader.js";

interface Counts {
  depth: number;
  members: number;
  values: number;
}

/** What a walk through the parsed value counts. */
function count(value: unknown, depth = 1): Counts {
  const sum = { depth: 0, members: 0, values: 0 };
  if (typeof value !== "object" || value === null) return sum;
  const inner = Object.values(value);
  sum.depth = depth;
  sum.members = 1 + (Array.isArray(value) ? 0 : inner.length);
  sum.values = Math.max(0, inner.length - 1);
  for (const one of inner) {
    const below = count(one, depth + 1);
    sum.depth = Math.max(sum.depth, below.depth);
    sum.members += below.members;
    sum.values += below.values;
  }
  return sum;
}

function accepts(text: string, cuts: readonly number[], limits: JsonLimits): boolean {
  return limitOf(text, cuts, limits) === undefined;
}

/** The limit that a text exceeds. */
function limitOf(text: string, cuts: readonly number[], limits: JsonLimits): unknown {
  const bytes = Buffer.from(text);
  const scan = new JsonScan(limits);
  const ends = [...cuts.map((cut) => cut % (bytes.length + 1)), bytes.length].sort((a, b) => a - b);
  try {
    let from = 0;
    for (const end of ends) {
      scan.push(bytes.subarray(from, end));
      from = end;
    }
    return undefined;
  } catch (error) {
    if (KvError.is(error, "KV_REQUEST_INVALID")) return error.details["limit"];
    throw error;
  }
}

test("names the first limit that a text exceeds, wherever it is cut", () => {
  const limits = { bodyDepth: 2, bodyMembers: 9, bodyValues: 3 };
  const text = '{"a":[1,2,3,4,5,[[[6]]]],"b":{"c":{"d":{}}}}';
  const whole = limitOf(text, [], limits);
  expect(whole).toBe("limits.bodyValues");
  for (let at = 0; at <= text.length; at += 1)
    expect([at, limitOf(text, [at], limits)]).toEqual([at, whole]);
});

test("counts what a parse finds, wherever the bytes are cut", () => {
  const text = fc.string({ unit: fc.constantFrom(...'"\\,:{]aé') });
  const value = fc.letrec((tie) => ({
    value: fc.oneof(
      { depthSize: "small" },
      text,
      fc.integer(),
      fc.array(tie("value"), { maxLength: 5 }),
      fc.dictionary(text, tie("value"), { maxKeys: 5 }),
    ),
  })).value;
  fc.assert(
    fc.property(
      value,
      fc.array(fc.nat(500), { maxLength: 5 }),
      fc.boolean(),
      (given, cuts, indented) => {
        const { depth, members, values } = count(given);
        const json = JSON.stringify(given, null, indented ? 1 : 0);
        const exact = { bodyDepth: depth, bodyMembers: members, bodyValues: values };
        expect(accepts(json, cuts, exact)).toBe(true);
        if (depth > 0) expect(accepts(json, cuts, { ...exact, bodyDepth: depth - 1 })).toBe(false);
        if (members > 0)
          expect(accepts(json, cuts, { ...exact, bodyMembers: members - 1 })).toBe(false);
        if (values > 0)
          expect(accepts(json, cuts, { ...exact, bodyValues: values - 1 })).toBe(false);
      },
    ),
    { numRuns: 500 },
  );
});

test("the outermost object has a limit of its own", () => {
  const limits = { bodyDepth: 9, bodyMembers: 1e6, bodyValues: 1e6 };
  const object = (members: number) =>
    JSON.stringify(Object.fromEntries(Array.from({ length: members }, (_, at) => [`k${at}`, at])));
  expect(accepts(object(TOP_LEVEL_MEMBERS), [], limits)).toBe(true);
  expect(accepts(object(TOP_LEVEL_MEMBERS + 1), [], limits)).toBe(false);
  expect(accepts(`{"x":${object(TOP_LEVEL_MEMBERS + 1)}}`, [], limits)).toBe(true);
});
