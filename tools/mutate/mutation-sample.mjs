// A plugin of Stryker: mutates a part of the statements and conditions, the same ones in each run
// (KV_MUTATE_SAMPLE: one of how many). What decides is the text, so an edit elsewhere in a file
// changes nothing.
import { createHash } from "node:crypto";

const oneOf = Number(process.env.KV_MUTATE_SAMPLE ?? 1);

/** The number of a text that decides. A new word here makes another sample. */
const draw = (text) => createHash("sha256").update(`first ${text}`).digest().readUInt32BE() % oneOf;

/** A condition, or a statement without others inside. */
function isSmall(path) {
  if (path.key === "test") return true;
  if (!path.isStatement() || path.isBlockStatement()) return false;
  let inner = false;
  path.traverse({
    Statement(statement) {
      inner = true;
      statement.stop();
    },
  });
  return !inner;
}

export const strykerPlugins = [
  {
    kind: "Ignore",
    name: "sample",
    value: {
      shouldIgnore: (path) =>
        oneOf > 1 && isSmall(path) && draw(path.toString()) !== 0 ? "not in the sample" : undefined,
    },
  },
];
