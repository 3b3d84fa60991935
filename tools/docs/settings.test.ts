import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import { PROGRAM as PICKER } from "../../packages/epp/src/config/cli-options.js";
import { type Setting, settingsIn } from "../../packages/fleet/src/settings/settings-table.js";
import { PROGRAM as PROXY } from "../../packages/proxy/src/config/cli-options.js";
import { root } from "../repository/source-files.js";

// `npx vitest run tools/docs/settings.test.ts -u` writes the tables again.
describe.each([
  ["proxy", PROXY],
  ["epp", PICKER],
] as const)("settings of @kv/%s", (folder, { file, flags }) => {
  const inPackage = (path: string) => join(root, "packages", folder, path);

  test("the README lists each setting and each flag with its default", async () => {
    const readme = readFileSync(inPackage("README.md"), "utf8");
    const settings = settingsIn(file).map((one) => [
      code(one.path.join(".")),
      flagOf(one),
      ...rest(one),
    ]);
    const others = settingsIn(flags).map((one) => [flagOf(one), ...rest(one)]);
    const made = withTable(
      withTable(readme, ["setting", "flag", "default", "meaning"], settings),
      ["flag", "default", "meaning"],
      others,
    );
    await expect(made).toMatchFileSnapshot(inPackage("README.md"));
  });

  test("each setting is described", () => {
    const schema = JSON.parse(readFileSync(inPackage("schema/config.json"), "utf8")) as JsonSchema;
    expect(undescribed(schema)).toEqual([]);
  });
});

/** The default and the meaning, where flags and what stands for a value are code. */
function rest({ usual = "none", description, choices }: Setting): [string, string] {
  const codes = /--[a-z-]+( [a-z]+(?=\)|$))?|[@:][A-Z]+|\*(\.[A-Z]+)?|\w+=\w+/g;
  const marked = description.replaceAll(codes, code);
  return [
    usual.replaceAll(codes, code),
    choices === undefined ? marked : `${marked} (${choices.map(code).join(", ")})`,
  ];
}

/** The names of a flag, without its value. */
function flagOf({ flag }: Setting): string {
  return [...(flag ?? "").matchAll(/--[a-z-]+/g)].map(([name]) => code(name)).join(", ");
}

function code(text: string): string {
  return `\`${text}\``;
}

/** A page with these rows in its table of these columns. */
function withTable(
  page: string,
  columns: readonly string[],
  rows: readonly (readonly string[])[],
): string {
  const row = (cells: readonly string[]) => `| ${cells.join(" | ")} |\n`;
  const heading = row(columns);
  const [before = "", after = "", ...more] = page.split(`\n${heading}`);
  expect(more).toEqual([]);
  const table = heading + row(columns.map(() => "---")) + rows.map(row).join("");
  return `${before}\n${table}${after.replace(/^(\|.*\n)*/, "")}`;
}

interface JsonSchema {
  readonly description?: string;
  readonly properties?: Readonly<Record<string, JsonSchema>>;
}

/** The settings without a description, beside members of a described setting. */
function undescribed({ properties = {} }: JsonSchema): string[] {
  const members = Object.entries(properties);
  const isTable = members.some(([, { description }]) => description !== undefined);
  return members.flatMap(([name, member]) => [
    ...(isTable && member.description === undefined ? [name] : []),
    ...undescribed(member),
  ]);
}
