import { expect, test } from "vitest";
import { escapeXml, roundTicks } from "./svg.js";

test.each([
  [2263.4, [0, 1000, 2000]],
  [3, [0, 1, 2, 3]],
  [0.9, [0, 0.5]],
  [700, [0, 200, 400, 600]],
])("first-contact.md: an axis to %s ms has round ticks", (most, ticks) => {
  expect(roundTicks(most)).toEqual(ticks);
});

test("what a peer sent is text of the picture", () => {
  expect(escapeXml('<a b="c">&\u0007')).toBe("&#60;a b=&#34;c&#34;&#62;&#38;?");
});
