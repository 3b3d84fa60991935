import { existsSync } from "node:fs";
import { join, posix } from "node:path";
import { KV_ERROR_CODES } from "@kv/interface";
import { expect, test } from "vitest";
import { root } from "../repository/source-files.js";
import { anchorsOf, linked, type Page, readPages } from "./pages.js";
import { sidebarOf } from "./sidebar.js";

const { pages } = readPages();
const textOf = (source: string) => pages.find((page) => page.source === source)?.text ?? "";

test("every link of every page leads to a page, a heading or a file", () => {
  const dead: string[] = [];
  for (const page of pages) linked(page, pages, "https://example.org", dead);
  expect(dead).toEqual([]);
});

test("a link that leads nowhere is found, and others are rewritten for the site", () => {
  const page: Page = {
    source: "docs/a.md",
    target: "a.md",
    text: "# A\n[b](../packages/x/README.md#two-words) [c](#a) [d](#b) [e](gone.md) [f](../package.json)\n```\n[g](gone.md)\n```\n",
  };
  const other: Page = {
    source: "packages/x/README.md",
    target: "packages/x.md",
    text: "## Two words!\n",
  };
  const dead: string[] = [];
  expect(linked(page, [page, other], "https://example.org", dead)).toBe(
    "# A\n[b](./packages/x.md#two-words) [c](./a.md#a) [d](./a.md#b) [e](./gone.md) [f](https://example.org/blob/main/package.json)\n```\n[g](gone.md)\n```\n",
  );
  expect(dead).toEqual(["docs/a.md: #b", "docs/a.md: gone.md"]);
});

/**
 * Paths of the repository in a page's text and commands. Those of what is built, and with a pattern
 * or a word in capitals for a name, are left out.
 */
function pathsIn(text: string): string[] {
  const folders =
    "apps|bench|deploy|docs|examples|native|packages|scripts|tools|\\.github|\\.changeset";
  const found = text.matchAll(
    new RegExp(`(?<![\\w/.@-])(?:${folders})/[\\w./@-]*\\w(?![\\w*{<…/])`, "g"),
  );
  return Array.from(found, ([path]) => path).filter(
    (path) =>
      !/(^|\/)(build|dist|node_modules)(\/|$)|\/[A-Z-]+\.md$/.test(path) ||
      /README\.md$/.test(path),
  );
}

test("first-contact.md 8: every path that a page names is there", () => {
  const named = pages.flatMap(({ source, text }) =>
    pathsIn(text).map((path) => ({
      source,
      path,
      beside: posix.join(posix.dirname(source), path),
    })),
  );
  expect(named.length).toBeGreaterThan(300);
  const missing = named.filter(
    ({ path, beside }) => !existsSync(join(root, path)) && !existsSync(join(root, beside)),
  );
  expect(missing.map(({ source, path }) => `${source}: ${path}`)).toEqual([]);
});

test("first-contact.md: the sidebar has each page once, and nothing else", () => {
  const links = sidebarOf(pages).flatMap(({ items }) =>
    items.map(({ link }) => `${link.slice(1)}.md`),
  );
  const targets = pages.map(({ target }) => target).filter((target) => target !== "index.md");
  expect(links.toSorted()).toEqual(targets.toSorted());
});

test("headings get the ids of the repository's web pages", () => {
  const text = "# Where did it go? `kv-peer wire`\n## A, b_c\n## A, b_c\n```\n# no heading\n```\n";
  expect([...anchorsOf(text)]).toEqual(["where-did-it-go-kv-peer-wire", "a-b_c", "a-b_c-1"]);
});

test("every code of the troubleshooting page is one of the closed list", () => {
  const codes = textOf("docs/troubleshooting.md").match(/KV_[A-Z_]+/g) ?? [];
  expect(codes.length).toBeGreaterThan(10);
  expect(codes.filter((code) => !(KV_ERROR_CODES as readonly string[]).includes(code))).toEqual([]);
});
