import fc from "fast-check";
import { expect, test } from "vitest";
import { MemberEditor } from "./member-editor.js";

const edits = {
  hidden: null,
  also_hidden: null,
  usage: (value: string) => Promise.resolve(value.replace("1", "2")),
};

/** What leaves of a text whose reads end at these bytes. */
async function edit(text: string, cuts: readonly number[], isStream: boolean): Promise<string> {
  const bytes = Buffer.from(text);
  const editor = new MemberEditor(edits, { isStream });
  const passed: Buffer[] = [];
  const ends = [...cuts.map((at) => at % bytes.length).sort((a, b) => a - b), bytes.length];
  let from = 0;
  for (const to of ends) {
    passed.push(await editor.push(bytes.subarray(from, to)));
    from = to;
  }
  passed.push(editor.end());
  return Buffer.concat(passed).toString();
}

const everyCut = (text: string) => Array.from(Buffer.from(text).keys(), (at) => [at]);

test.each([
  [
    "in objects and lists",
    '{"a":[{"hidden":[1,{"b":"]"}],"c":"é"}]}',
    '{"a":[{"hidden":null,"c":"é"}]}',
  ],
  ["blanks", '{ "hidden" :\n {"a": 1} ,"b":2}', '{ "hidden" :\n null ,"b":2}'],
  [
    "numbers and null",
    '{"hidden":-1.5e3,"also_hidden":null}',
    '{"hidden":null,"also_hidden":null}',
  ],
  ["a string with quotes", String.raw`{"hidden":"a\\\"b","c":1}`, '{"hidden":null,"c":1}'],
  ["names in values", String.raw`["hidden",{"a":"hidden","b":"\"hidden\":{}"}]`, undefined],
  ["a value that an edit reads", '{"usage":{"é":[1]}}', '{"usage":{"é":[2]}}'],
  ["a value that breaks off", '{"a":1,"usage":{"b":', undefined],
])("JSON, wherever it is cut: %s", async (_what, text, expected = text) => {
  for (const cuts of everyCut(text))
    expect([cuts, await edit(text, cuts, false)]).toEqual([cuts, expected]);
});

test.each([
  [
    "lines of other fields",
    'event: "hidden":{}\n: "hidden":[\ndata:{"hidden":1}\n\n',
    '{"hidden":null}',
  ],
  ["a byte order mark", '\ufeffdata: {"hidden":"a"}\n\n', '{"hidden":null}'],
  [
    "a value of several lines",
    'data: {"hidden"\ndata:: {\nid: }\ndata: "a": 1\n: }\ndata:}, "b": 1}\n\ndata: {"hidden":2}\n\n',
    '{"hidden"\ndata:: \nid: }\ndata: \n: }\ndata:null, "b": 1}\n\ndata: {"hidden":null}',
  ],
  ["a value that its event cuts off", 'data: {"usage":{"a":1\n\ndata: {"b":"}"}\n\n', undefined],
])("streams, wherever they are cut: %s", async (_what, text, data) => {
  const expected = data === undefined ? text : text.replace(/\{"hidden".*(?=\n\n)/s, data);
  for (const end of ["\n", "\r\n", "\r"])
    for (const cuts of everyCut(text)) {
      const given = text.replaceAll("\n", end);
      const edited = (await edit(given, cuts, true)).replaceAll(end, "\n");
      // What was held of a value that breaks off leaves with the line that ends the event.
      const same =
        data === undefined ? edited.replace('{"usage":\n{"a":1', '{"usage":{"a":1\n') : edited;
      expect([end, cuts, same]).toEqual([end, cuts, expected]);
    }
});

test("any JSON, cut anywhere, is the same but for the members", async () => {
  const name = fc.constantFrom("hidden", "a", 'b"', "also_hidden\\");
  const { value } = fc.letrec<{ value: unknown }>((tie) => ({
    value: fc.oneof(
      { maxDepth: 4 },
      fc.oneof(fc.string({ unit: "binary" }), fc.integer(), fc.constant(null), fc.boolean(), name),
      fc.array(tie("value"), { maxLength: 3 }),
      fc.dictionary(name, tie("value"), { maxKeys: 4 }),
    ),
  }));
  await fc.assert(
    fc.asyncProperty(
      value,
      fc.array(fc.nat(10_000), { maxLength: 4 }),
      fc.nat(3),
      async (json, cuts, indent) => {
        const text = `[${JSON.stringify(json, null, indent)}]`;
        const expected = `[${JSON.stringify(JSON.parse(text)[0], (key, one) => (key === "hidden" ? null : one), indent)}]`;
        const counted = (all: string) => all.replaceAll(/[12]/g, "1");
        expect(counted(await edit(text, cuts, false))).toBe(counted(expected));
      },
    ),
    { numRuns: 300 },
  );
});
