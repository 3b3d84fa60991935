import fc from "fast-check";
import { expect, test } from "vitest";
import {
  decodeMsgpack,
  decodeMsgpackInSteps,
  encodeMsgpack,
  Float64,
  MSGPACK_LIMITS,
} from "../index.js";

const hex = (data: Uint8Array) => Buffer.from(data).toString("hex");
const decode = (data: string, limits?: Parameters<typeof decodeMsgpack>[2]) =>
  decodeMsgpack(Buffer.from(data, "hex"), "frame", limits);
const code = (wanted: string) => expect.objectContaining({ code: wanted });

// Each hex text is the output of Python's msgspec.msgpack.encode.
test.each([
  ["cf00007fb71e7fd040", 140424467435584],
  ["ceffffffff", 2 ** 32 - 1],
  ["cf0000000100000000", 2 ** 32],
  ["cf001fffffffffffff", Number.MAX_SAFE_INTEGER],
  ["cd0100", 256],
  ["cc80", 128],
  ["7f", 127],
  ["ff", -1],
  ["d0df", -33],
  ["c40161", Uint8Array.of(0x61)],
  ["a161", "a"],
  ["82a162c0a16193c2c3cb3ff8000000000000", { b: null, a: [false, true, 1.5] }],
])("%s decodes and encodes to the same bytes", (bytes, value) => {
  expect(decode(bytes)).toEqual(value);
  expect(hex(encodeMsgpack(value))).toBe(bytes);
});

test("Float64 encodes a whole number as a float64", () => {
  expect(hex(encodeMsgpack(new Float64(5)))).toBe("cb4014000000000000");
});

test.each([
  ["a Float64", { clock: new Float64(5) }],
  ["a Map", [new Map()]],
  ["a Date", { at: new Date(0) }],
])("%s within a message is refused", (_, value) => {
  expect(() => encodeMsgpack(value)).toThrow(code("KV_INTERNAL"));
});

test.each([
  ["empty input", ""],
  ["an integer beyond 2^53", "cfffffffffffffffff"],
  ["an integer of 2^53", "cf0020000000000000"],
  ["a negative integer beyond 2^53", "d38000000000000000"],
  ["a second value", "c0c0"],
  ["a truncated string", "a36162"],
  ["a truncated array", "9201"],
  ["a string that is not UTF-8", "a2c328"],
  ["a key that is not a string", "810102"],
  ["a key that is bytes", "81c4016102"],
  ["__proto__ as a key", "81a95f5f70726f746f5f5f80"],
  ["an extension", "d60100000000"],
  ["a timestamp", "d6ff00000000"],
  ["the reserved byte 0xc1", "c1"],
])("%s is malformed", (_, bytes) => {
  expect(() => decode(bytes)).toThrow(code("KV_WIRE_MALFORMED"));
  expect(() => decode(bytes)).toThrow("frame: ");
});

test.each([
  ["message size", "c403616161", { maxBytes: 4 }],
  ["nesting depth", "91".repeat(17), {}],
  ["a list header with a huge length", "ddffffffff", {}],
  ["a map header with a huge length", "dfffffffff", {}],
  ["items of one list", "93010101", { maxItems: 2 }],
  ["entries of one map", "83a16101a16201a16301", { maxItems: 2 }],
  ["total number of values", "9292010192010192", { maxValues: 5 }],
])("enforces limits before allocating memory: %s", (_, bytes, limits) => {
  const all = { maxBytes: 2 ** 20, maxDepth: 16, maxItems: 200_000, ...limits };
  expect(() => decode(bytes, all)).toThrow(code("KV_WIRE_LIMIT_EXCEEDED"));
});

test("decoded bytes do not change when the input buffer is reused", () => {
  const frame = Buffer.from("c40161", "hex");
  const decoded = decodeMsgpack(frame, "frame") as Uint8Array;
  frame.fill(0);
  expect([...decoded]).toEqual([0x61]);
});

test("plain data decodes to what was encoded", () => {
  const leaf = fc.oneof(
    fc.maxSafeInteger().map((n) => (Object.is(n, -0) ? 0 : n)),
    fc.string({ unit: "binary", maxLength: 40 }),
    fc.boolean(),
    fc.constant(null),
    fc.uint8Array({ maxLength: 20 }),
  );
  const inside = fc.array(leaf, { maxLength: 40 });
  const key = fc.string({ maxLength: 40 }).filter((name) => name !== "__proto__");
  fc.assert(
    fc.property(
      fc.dictionary(key, fc.oneof(leaf, inside), { noNullPrototype: true, maxKeys: 20 }),
      (value) => {
        expect(decodeMsgpack(encodeMsgpack(value), "frame")).toEqual(value);
      },
    ),
  );
});

test("A5: a message is decoded in steps of less than a thousand values", () => {
  const value = [
    null,
    true,
    false,
    -1,
    -32,
    -33,
    -129,
    -40_000,
    -5_000_000_000,
    127,
    128,
    300,
    70_000,
    5_000_000_000,
    1.5,
    "",
    "é".repeat(40),
    "x".repeat(300),
    new Uint8Array(3),
    new Uint8Array(300),
    [],
    {},
    [[]],
    { a: [{ b: 1 }, "c"], d: {} },
    Array.from({ length: 3000 }, (_, at) => at),
    Object.fromEntries(Array.from({ length: 20 }, (_, at) => [`k${at}`, at])),
  ];
  const limits = {
    maxBytes: 2 ** 20,
    maxItems: 20_000,
    maxValues: 10_000,
    maxDepth: 4,
    maxTextBytes: 1000,
  };
  const steps = decodeMsgpackInSteps(encodeMsgpack(value), "a value", limits);
  let count = 0;
  let next = steps.next();
  for (; next.done !== true; next = steps.next()) count += 1;
  expect(next.value).toEqual(value);
  expect(count).toBeGreaterThanOrEqual(3);
  const whole = encodeMsgpack(value);
  for (const end of [0, 1, 20, whole.length - 1])
    expect(() => [...decodeMsgpackInSteps(whole.subarray(0, end), "a value", limits)]).toThrow(
      "truncated",
    );
  for (const [wrong, said] of [
    [Uint8Array.from([...encodeMsgpack(1), 0]), "KV_WIRE_MALFORMED"],
    [Uint8Array.from([0xa1, 0xff]), "KV_WIRE_MALFORMED"],
    [Uint8Array.from([0x81, 0x01, 0x01]), "KV_WIRE_MALFORMED"],
    [encodeMsgpack([[[[[1]]]]]), "KV_WIRE_LIMIT_EXCEEDED"],
    [encodeMsgpack("x".repeat(1001)), "KV_WIRE_LIMIT_EXCEEDED"],
    [encodeMsgpack(Array(10_001).fill(0)), "KV_WIRE_LIMIT_EXCEEDED"],
  ] as const)
    expect(() => [...decodeMsgpackInSteps(wrong, "a value", limits)]).toThrow(code(said));
});

test("integers beyond 2^53 are bigints where they are asked for", () => {
  const limits = { ...MSGPACK_LIMITS, bigIntegers: true };
  expect(decode("92cfffffffffffffffffd38000000000000000", limits)).toEqual([
    2n ** 64n - 1n,
    -(2n ** 63n),
  ]);
});

test("a long list of integers is an Int32Array with int32Lists, equal to the list without; another list stays one", () => {
  const limits = { ...MSGPACK_LIMITS, bigIntegers: true };
  const integer = fc.nat(0x7fffffff);
  const other = fc.constantFrom<unknown>(
    -1,
    2 ** 31,
    2 ** 40,
    1.5,
    null,
    "a",
    [1],
    Array(1000).fill(7),
    {},
  );
  const elements = fc.tuple(
    fc.array(integer, { minLength: 1, maxLength: 20 }),
    fc.nat(10_000),
    fc.option(other),
  );
  const asList = (value: unknown): unknown => {
    if (value instanceof Int32Array) return Array.from(value);
    return Array.isArray(value) ? value.map(asList) : value;
  };
  const counts = [0, 0];
  fc.assert(
    fc.property(elements, fc.nat(), ([some, length, odd], cut) => {
      const list: unknown[] = Array.from({ length }, (_, at) => some[at % some.length]);
      if (odd !== null) list.splice(Math.floor(length / 2), 0, odd);
      const bytes = encodeMsgpack({ list, after: "x" });
      const { list: decoded } = decodeMsgpack(bytes, "frame", { ...limits, int32Lists: true }) as {
        list: unknown;
      };
      const isTyped = odd === null && length >= 1000;
      counts[Number(isTyped)] = (counts[Number(isTyped)] ?? 0) + 1;
      expect(decoded instanceof Int32Array).toBe(isTyped);
      expect(asList(decoded)).toEqual(list);
      expect(() =>
        decodeMsgpack(bytes.subarray(0, cut % bytes.length), "frame", {
          ...limits,
          int32Lists: true,
        }),
      ).toThrow(code("KV_WIRE_MALFORMED"));
    }),
    { numRuns: 100 },
  );
  expect(Math.min(...counts)).toBeGreaterThan(5);
});
