import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import { PROGRAM as PICKER } from "../../packages/epp/src/config/cli-options.js";
import { type Setting, settingsIn } from "../../packages/fleet/src/settings/settings-table.js";
import { PROGRAM as PROXY } from "../../packages/proxy/src/config/cli-options.js";
import { root } from "../repository/source-files.js";

// `npx vitest run tools/docs/settings.test.ts -u` writes the lists again.
describe.each([
  ["proxy", PROXY],
  ["epp", PICKER],
] as const)("settings of @kv/%s", (folder, { file }) => {
  const inPackage = (path: string) => join(root, "packages", folder, path);

  test("the README lists each setting without a flag; --help describes the others", async () => {
    const readme = readFileSync(inPackage("README.md"), "utf8");
    const items = itemsOf(file);
    const own = folder === "proxy" ? items : withoutShared(items, itemsOf(PROXY.file));
    await expect(withList(readme, own)).toMatchFileSnapshot(inPackage("README.md"));
  });

  test("each setting is described", () => {
    const schema = JSON.parse(readFileSync(inPackage("schema/config.json"), "utf8")) as JsonSchema;
    expect(undescribed(schema)).toEqual([]);
  });
});

/** A setting of the file alone, as the README lists it. */
interface Item {
  readonly names: readonly string[];
  /** Its default and its meaning. */
  readonly text: string;
}

function itemsOf(table: Parameters<typeof settingsIn>[0]): Item[] {
  return settingsIn(table)
    .filter(({ flag }) => flag === undefined)
    .map((one) => ({ names: [code(one.path.join("."))], text: textOf(one) }));
}

/**
 * A list with one item for all settings that the list of `kv-proxy` has in the same words. Where
 * these are all members of an object, the item has the object's name.
 */
function withoutShared(items: readonly Item[], shared: readonly Item[]): Item[] {
  const texts = new Set(shared.map(lineOf));
  const own = items.filter((item) => !texts.has(lineOf(item)));
  const nameOf = ({ names: [name = ""] }: Item) => name;
  const objectOf = (item: Item) => nameOf(item).replace(/\..*/, ".…`");

  const divided = new Set(own.map(objectOf));
  const names = items
    .filter((item) => !own.includes(item))
    .map((item) => (divided.has(objectOf(item)) ? nameOf(item) : objectOf(item)));
  return [...own, { names: [...new Set(names)], text: ": [as in `kv-proxy`](../proxy#settings)" }];
}

/** The default and the meaning, where flags are code. */
function textOf({ usual, description }: Setting): string {
  const flags = /--[a-z0-9-]+( [a-z]+(?=\)|$))?/g;
  const before = usual === undefined ? "" : ` (${usual})`;
  return `${before}: ${description}`.replaceAll(flags, code);
}

function code(text: string): string {
  return `\`${text}\``;
}

function lineOf({ names, text }: Item): string {
  return `- ${names.join(", ")}${text}\n`;
}

/** A page with these items in its list of settings. */
function withList(page: string, items: readonly Item[]): string {
  const list = /(?<=^<!-- settings: made -->\n\n)[\s\S]*?(?=\n<!-- end -->)/m;
  expect(page).toMatch(list);
  return page.replace(list, () => items.map(lineOf).join(""));
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
