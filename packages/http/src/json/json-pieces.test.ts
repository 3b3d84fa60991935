import { isDeepStrictEqual } from "node:util";
import fc from "fast-check";
import { expect, test } from "vitest";
import { parseJsonPieces } from "./json-pieces.js";

/** Parses in pieces of so many bytes; undefined for what is not JSON. */
function parsed(
  bytes: Uint8Array,
  pieceBytes: number,
  longMemberBytes = pieceBytes,
  idsMember?: string,
) {
  const pieces = parseJsonPieces(bytes, { pieceBytes, longMemberBytes, idsMember });
  let turns = 1;
  try {
    for (let step = pieces.next(); ; step = pieces.next()) {
      if (step.done === true) return { ...step.value, turns };
      turns += 1;
    }
  } catch (error) {
    if (error instanceof SyntaxError || error instanceof TypeError) return undefined;
    throw error;
  }
}

function whole(bytes: Uint8Array): unknown {
  try {
    return {
      value: JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes)) as unknown,
    };
  } catch {
    return undefined;
  }
}

/** The object of the short members, with the long ones after them. */
function joined({
  text,
  long,
}: {
  text: string;
  long: readonly { key: string; value: Uint8Array }[];
}) {
  const members = long.map(
    ({ key, value }) => `${JSON.stringify(key)}:${Buffer.from(value).toString()}`,
  );
  const before = text.slice(0, -1);
  return JSON.parse(
    `${before}${before === "{" || members.length === 0 ? "" : ","}${members.join(",")}}`,
  ) as unknown;
}

const characters = fc.constantFrom(...'"\\,:{]aé\u{1f600}\ud800\n\ufeff');
const string = fc.string({ unit: characters, maxLength: 40 });
const key = fc.oneof(string, fc.constantFrom("a", "b", "__proto__", "0", "constructor"));
const number = fc.constantFrom("0", "-0", "1e3", "-1.5E-2", "12345678901234567890", "0.1");
/** The text of a value, with blanks, escapes and keys that repeat. */
const { value: json } = fc.letrec<{ value: string }>((tie) => {
  const blank = fc.constantFrom("", "", " ", "\n\t", "\r");
  const written = (text: fc.Arbitrary<string>) =>
    fc.tuple(text, fc.boolean()).map(([value, isEscaped]) => {
      const plain = JSON.stringify(value);
      return isEscaped ? plain.replaceAll("a", "\\u0061").replaceAll("é", "\\u00e9") : plain;
    });
  const around = (inner: fc.Arbitrary<string>) =>
    fc.tuple(blank, inner, blank).map(([before, text, after]) => before + text + after);
  return {
    value: fc.oneof(
      { depthSize: "medium", withCrossShrink: true },
      around(fc.oneof(number, fc.constantFrom("null", "true", "false"), written(string))),
      around(fc.array(tie("value"), { maxLength: 6 }).map((values) => `[${values.join(",")}]`)),
      around(
        fc
          .array(fc.tuple(around(written(key)), tie("value")), { maxLength: 6 })
          .map((members) => `{${members.map(([name, value]) => `${name}:${value}`).join(",")}}`),
      ),
    ),
  };
});
const sizes = fc.tuple(fc.integer({ min: 1, max: 64 }), fc.integer({ min: 1, max: 64 }));

test("gives what JSON.parse gives, however long the pieces are", () => {
  const property = fc.property(json, sizes, (text, [pieceBytes, longMemberBytes]) => {
    const bytes = Buffer.from(text);
    const result = parsed(bytes, pieceBytes, longMemberBytes);
    const expected = JSON.parse(bytes.toString()) as unknown;
    expect(isDeepStrictEqual(result?.value, expected)).toBe(true);
    expect(JSON.stringify(result?.value)).toBe(JSON.stringify(expected));
    if (
      typeof expected === "object" &&
      expected !== null &&
      !Array.isArray(expected) &&
      result !== undefined
    )
      expect(isDeepStrictEqual(joined(result), expected)).toBe(true);
  });
  fc.assert(property, { numRuns: 1000 });
});

test("refuses what JSON.parse refuses", () => {
  const bytes = fc.constantFrom(...Buffer.from('[]{}:,-.0 1e"\\\né\ufeff'));
  const change = fc.record({
    at: fc.nat(),
    remove: fc.nat(2),
    insert: fc.array(bytes, { maxLength: 2 }),
  });
  const property = fc.property(
    json,
    fc.array(change, { maxLength: 3 }),
    sizes,
    (text, changes, [piece, long]) => {
      let changed = [...Buffer.from(text)];
      for (const { at, remove, insert } of changes) {
        changed = [...changed];
        changed.splice(at % (changed.length + 1), remove, ...insert);
      }
      const input = Buffer.from(changed);
      const result = parsed(input, piece, long);
      const value = result === undefined ? undefined : { value: result.value };
      expect(isDeepStrictEqual(value, whole(input))).toBe(true);
    },
  );
  fc.assert(property, { numRuns: 1000 });
});

test.each([
  "[-[1,2,3,4]]",
  '{"a":-[1,2,3,4]}',
  "[1[2,3,4]]",
  "[1,2,3,]",
  "[,1]",
  "[         ,1]",
  '"aaaaaaaa',
  "{}{}",
  "1,2",
  "]",
  '{"a":[1,2}',
  '[1,2,3"aaaaaa"]',
])("refuses %s", (text) => {
  for (let size = 1; size < 8; size += 1) expect(parsed(Buffer.from(text), size)).toBeUndefined();
});

test("no piece is longer than twice the limit, at any depth", () => {
  const ids = Array.from({ length: 4000 }, (_, at) => at);
  const text = "é\\".repeat(4000);
  const body = {
    a: ids,
    b: [[ids, { c: { d: ids } }], text],
    e: { f: text },
    g: Object.fromEntries(ids.entries()),
  };
  const parse = JSON.parse;
  let longest = 0;
  JSON.parse = (piece: string) => {
    longest = Math.max(longest, Buffer.byteLength(piece));
    return parse(piece) as unknown;
  };
  try {
    const bytes = Buffer.from(JSON.stringify(body));
    const result = parsed(bytes, 1000);
    expect(result?.value).toEqual(body);
    expect(longest).toBeLessThanOrEqual(2000);
    expect(result?.turns).toBeGreaterThanOrEqual(Math.floor(bytes.length / 2000));
  } finally {
    JSON.parse = parse;
  }
});

test("the end of a string with many escaped quotes is searched in pieces", () => {
  const bytes = new TextEncoder().encode(JSON.stringify({ a: ['"'.repeat(10_000)] }));
  let searches = 0;
  bytes.indexOf = (byte: number, from?: number) => {
    searches += 1;
    return Uint8Array.prototype.indexOf.call(bytes, byte, from);
  };
  const pieces = parseJsonPieces(bytes, { pieceBytes: 100 });
  let most = 0;
  let step = pieces.next();
  for (; step.done !== true; step = pieces.next()) {
    most = Math.max(most, searches);
    searches = 0;
  }
  expect(most).toBeLessThanOrEqual(200);
  expect(step.value.value).toEqual({ a: ['"'.repeat(10_000)] });
});

const OTHERS = ["1 2", "", '"a"', " 7 ", "[1,2,3,4,5,6,7,8,9]"];
/** The text of a list of token ids, in which something else may be. */
const idList = fc
  .tuple(
    fc.array(fc.nat(999_999_999), { maxLength: 30 }),
    fc.array(
      fc.tuple(
        fc.nat(),
        fc.constantFrom(..."-1 1.0 1e2 01 1000000000 [1] null".split(" "), ...OTHERS),
      ),
      { maxLength: 1 },
    ),
    fc.constantFrom(",", " ,", ",\n"),
  )
  .map(([ids, others, comma]) => {
    const elements = ids.map(String);
    for (const [at, other] of others) elements.splice(at % (elements.length + 1), 0, other);
    return `[${elements.join(comma)}]`;
  });

test("a long list of token ids is an Int32Array with what JSON.parse gives, and no list where something else is in it", () => {
  const bodies = fc.oneof(
    idList.map((list) => `{"model":"m","prompt":${list},"stop_token_ids":[1,2,3,4,5,6,7,8,9]}`),
    fc.array(idList, { maxLength: 4 }).map((lists) => `{"prompt":[${lists.join()}]}`),
  );
  const asLists = (value: unknown): unknown => {
    if (value instanceof Int32Array) return Array.from(value);
    return Array.isArray(value) ? value.map(asLists) : value;
  };
  let typed = 0;
  const property = fc.property(bodies, sizes, (text, [piece, long]) => {
    const bytes = Buffer.from(text);
    const result = parsed(bytes, piece, long, "prompt");
    const value = result?.value as Record<string, unknown> | undefined;
    if (value?.prompt instanceof Int32Array) typed += 1;
    expect(value?.stop_token_ids).not.toBeInstanceOf(Int32Array);
    expect(result && { value: { ...value, prompt: asLists(value?.prompt) } }).toEqual(whole(bytes));
  });
  fc.assert(property, { numRuns: 2000 });
  expect(typed).toBeGreaterThan(200);
});
