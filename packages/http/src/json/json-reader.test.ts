import fc from "fast-check";
import { expect, test } from "vitest";
import { editMembers, rawMember, topLevelMembers } from "./json-reader.js";

test("edits keep integers beyond 2^53, floats, order and unknown fields as written", () => {
  const text = '{ "seed": 9223372036854775807 , "x":1.0,"deep":{"a":[1,"}",{}]},"s":"a\\"],b" }';
  expect(editMembers(text, { set: { stream: "false" } })).toBe(
    '{"seed": 9223372036854775807,"x":1.0,"deep":{"a":[1,"}",{}]},"s":"a\\"],b","stream":false}',
  );
  expect(rawMember(text, "seed")).toBe("9223372036854775807");
});

test("finds the end of lists and objects that are longer than what is stepped through", () => {
  const ids = JSON.stringify(Array.from({ length: 2000 }, (_, at) => at));
  const list = `[${ids},{"a\\"]}":[${ids}]}, ${ids} ]`;
  expect(rawMember(`{"a":${list},"b":[]}`, "a")).toBe(list);
  expect(rawMember(`{"a":${list},"b":[]}`, "b")).toBe("[]");
});

test("reads the last value of a duplicate key, and edits change all of them", () => {
  const text = '{"n":1,"\\u006e":5,"m":2}';
  expect(rawMember(text, "n")).toBe("5");
  expect(editMembers(text, { set: { n: "1" } })).toBe('{"m":2,"n":1}');
  expect(editMembers(text, { remove: ["n"] })).toBe('{"m":2}');
});

test("adds members to an empty object", () => {
  expect(topLevelMembers(" {\n} ")).toEqual([]);
  expect(editMembers("{}", { set: { a: "[]" } })).toBe('{"a":[]}');
  expect(rawMember("{}", "a")).toBeUndefined();
});

test("for any object and indentation, members parse to their values, and an edit changes nothing else", () => {
  const json = fc.dictionary(fc.string(), fc.jsonValue());
  fc.assert(
    fc.property(json, fc.integer({ min: 0, max: 3 }), fc.string(), (object, indent, key) => {
      const text = JSON.stringify(object, null, indent);
      const parsed = JSON.parse(text) as Record<string, unknown>;
      const members = topLevelMembers(text);
      expect(members.map((member) => member.key)).toEqual(Object.keys(parsed));
      for (const member of members) {
        expect(JSON.parse(text.slice(member.valueStart, member.end))).toEqual(parsed[member.key]);
      }
      const edited = JSON.parse(editMembers(text, { set: { [key]: '{"edited":true}' } })) as object;
      const expected = new Map([...Object.entries(parsed), [key, { edited: true }]]);
      expect(new Map(Object.entries(edited))).toEqual(expected);
    }),
  );
});
