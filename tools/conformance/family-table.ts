import { ARCHITECTURES, familyOfRule } from "../../packages/kv-plan/src/model/architectures.js";

/** docs/architectures.md: each architecture of the release, and what else is refused. */
export function architecturesPage(): string {
  const { release, architectures, refused, servedUntil, others } = ARCHITECTURES;
  const planned = Object.entries(architectures).map(([name, learned]) => {
    const family = familyOfRule(learned).name;
    const note = family === "Whisper" ? "; a pair is refused: an encoder-decoder" : "";
    return [name, `equal: ${family}${note}`] as const;
  });
  const unknown = Object.entries(refused).map(
    ([name, why]) => [name, `refused: ${why.replaceAll(/[|<>]/g, "")}`] as const,
  );
  const rows = [...planned, ...unknown].sort(([one], [other]) => (one < other ? -1 : 1));
  return `# Architectures of vLLM ${release}

What [\`kv-plan --config\`](kv-plan.md) does with each. "Equal": the caches are those that vLLM's own
code makes, in each answer of \`tools/conformance/fixtures\`. Refused by name are also

- a field's value that these answers do not show, where it may decide a cache;
- a TP size that does not divide the heads, as vLLM refuses it;
- ${Object.keys(servedUntil).length} architectures that only an older vLLM serves, and ${others.length} that generate no text.

| architecture | caches |
| --- | --- |
${rows.map(([name, what]) => `| \`${name}\` | ${what} |\n`).join("")}`;
}
