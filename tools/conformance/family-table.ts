import { ARCHITECTURES, familyOfRule } from "../../packages/kv-plan/src/model/architectures.js";

const code = (names: readonly string[]) => names.map((name) => `\`${name}\``).join("; ");

/** The table of docs/kv-plan.md: each architecture, by its family, and what is refused. */
export function familyTable(): string {
  const { release, architectures, refused, servedUntil, others } = ARCHITECTURES;
  const byFamily = new Map<string, string[]>();
  for (const [name, learned] of Object.entries(architectures)) {
    const family = familyOfRule(learned).name;
    byFamily.set(family, [...(byFamily.get(family) ?? []), name]);
  }
  const planned = [...byFamily].map(([family, names]) =>
    family === "Whisper"
      ? [family, code(names), "its caches are known; a pair is refused: an encoder-decoder"]
      : [family, code(names), "planned"],
  );
  const rows = [
    ["family", "architectures", "planned or refused"],
    ["---", "---", "---"],
    ...planned,
    ["not learned", `${Object.keys(refused).length} others`, "refused, with the reason"],
    [
      "served by an older vLLM",
      `${Object.keys(servedUntil).length} others`,
      `refused: vLLM ${release} does not serve them`,
    ],
    ["generate no text", `${others.length} others`, "refused: nothing is handed over"],
    ["any other architecture", "", `refused: vLLM ${release} does not have it`],
    [
      "a field with a value that vLLM was not asked with, where it may decide a cache",
      "",
      "refused: the field is named",
    ],
    ["a TP size that does not divide the heads", "", "refused: vLLM refuses it"],
  ];
  return rows
    .map((row) => `| ${row.join(" | ")} |`)
    .join("\n")
    .concat("\n");
}
