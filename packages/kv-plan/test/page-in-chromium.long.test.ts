// A long suite: pages in a browser.
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { scratchFolder } from "@kv/testing/scratch-folder";
import type { Browser, Page } from "puppeteer-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { buildReportScript } from "../page/build.js";
import { renderHtml } from "../src/render/render-html.js";
import type { PlanReport } from "../src/report/report.js";
import { model, planned, refused } from "./captured-run.js";
import { chromium, openBrowser, openPage } from "./chromium.js";

const llama = `--config ${model("llama-3.1-70b")}`;
const HOSTILE = '</script><img src=x onerror="document.title=1"><!-- <script>';

describe.skipIf(chromium === undefined)("the page in Chromium", () => {
  const folder = scratchFolder();
  let browser: Browser | undefined;
  let page: Page;
  let report: PlanReport;
  let script: string;
  const complaints: string[] = [];

  const open = async (name: string, html: string) => {
    const path = join(folder, name);
    writeFileSync(path, html);
    await page.goto(pathToFileURL(path).href);
  };
  const texts = (selector: string) =>
    page.$$eval(selector, (elements) => elements.map((element) => element.textContent ?? ""));

  beforeAll(async () => {
    report = await planned(
      `${llama} --tp 8 --tp 4 --block-size 16 --block-size 32 --tokens 100 --form permute`,
    );
    script = await buildReportScript();
    browser = await openBrowser();
    page = await openPage(browser, complaints);
  }, 180_000);

  afterAll(() => browser?.close(), 60_000);

  test("a decode rank shows its reads, and a block shows the source of its bytes", async () => {
    await open("plan.html", renderHtml(report, script));
    expect(await page.$eval("body", (body) => body.dataset["ready"])).toBe("true");
    await page.click('button[data-decode-rank="1"]');
    const rank = report.ranks[1];
    const reads = await texts("#detail table tr:not(:first-child) td:first-child");
    expect(reads).toEqual(rank?.reads.map((read) => `P${read.prefillRank}`));
    const block = report.blocks.find((one) => one.decodeRank === 1 && one.pieces.length > 0);
    if (block === undefined) return expect.fail("the report shows no block");
    await page.click(`button[data-block="${block.block}"]`);
    expect(await page.$$eval(".piece", (pieces) => pieces.length)).toBe(block.pieces.length);
    // Two sources with a share of each of two parts.
    expect(block.pieces).toHaveLength(4);
    const widths = await page.$$eval(".piece", (pieces) =>
      pieces.map((piece) => piece.getBoundingClientRect().width),
    );
    const bar = await page.$eval(".bar", (element) => element.getBoundingClientRect().width);
    expect(widths.reduce((sum, width) => sum + width, 0) / bar).toBeGreaterThan(0.95);
    const cells = await texts("#pieces tr:nth-child(2) td");
    const [first] = block.pieces;
    expect(cells).toEqual([
      `${first?.offset} to ${(first?.offset ?? 0) + (first?.lengthBytes ?? 0)}`,
      `P${first?.prefillRank}`,
      `${first?.remoteBlock}`,
      `${first?.remoteOffset} to ${(first?.remoteOffset ?? 0) + (first?.lengthBytes ?? 0)}`,
    ]);
    expect((await texts("#block p")).join(" ")).toContain("puts its heads and tokens in order");
  });

  test("a chosen rank's curves and their ends stand out, until it is chosen again", async () => {
    await open("plan.html", renderHtml(report, script));
    const standOut = () =>
      page.$$eval(".wide .on", (found) =>
        found.map((one) => [one.getAttribute("data-prefill"), one.getAttribute("data-decode")]),
      );
    await page.focus('button[data-decode-rank="1"]');
    await page.keyboard.press("Enter");
    const sources = report.ranks[1]?.reads.map(({ prefillRank }) => `P${prefillRank}`) ?? [];
    expect(await standOut()).toEqual([
      ...sources.map((source) => [source, "D1"]),
      ...sources.map((source) => [source, null]),
      [null, "D1"],
    ]);
    await page.keyboard.press("Enter");
    expect(await standOut()).toEqual([]);
    expect(await page.$$eval(".kv-plan.chosen", (found) => found.length)).toBe(0);
  });

  test("blocks that are not listed are counted", async () => {
    const long = await planned(`${llama} --tp 8 --tp 4 --tokens 1600`);
    await open("long.html", renderHtml(long, script));
    await page.click('button[data-decode-rank="0"]');
    expect(await texts("#left-out")).toEqual([
      "The first 48 blocks are listed; 52 more of this rank are not.",
    ]);
  });

  test("the last block shows the first zeroed token", async () => {
    const last = report.blocks.filter((one) => one.decodeRank === 0).at(-1);
    await open("plan.html", renderHtml(report, script));
    await page.click('button[data-decode-rank="0"]');
    await page.click(`button[data-block="${last?.block}"]`);
    expect((await texts("#block p")).join(" ")).toContain(
      `zeroes it from its token ${last?.zeroFrom} on`,
    );
  });

  test("a prefill rank shows its readers and the notifications that it waits for", async () => {
    await open("plan.html", renderHtml(report, script));
    await page.click('button[data-prefill-rank="3"]');
    expect((await texts("#detail p")).join(" ")).toContain("Awaits 1 notifications, from D1.");
    expect(await texts("#detail table tr:not(:first-child) td:first-child")).toEqual(["D1"]);
    expect(
      await page.$eval('button[data-prefill-rank="3"]', (button) =>
        button.getAttribute("aria-pressed"),
      ),
    ).toBe("true");
  });

  test("pipeline stages: shows rank names, and the caches and a block of each stage", async () => {
    const staged = await planned(`${llama} --tp 2 --tp 1 --pp 2 --tokens 32`);
    await open("stages.html", renderHtml(staged, script));
    await page.click('button[data-prefill-stage="1"][data-prefill-rank="0"]');
    expect((await texts("#detail h2")).join()).toBe("Prefill rank 0 of stage 1");
    expect((await texts("#caches")).join()).toMatch(/^model\.layers\.40\..*model\.layers\.79\./);
    await page.click('button[data-decode-rank="0"]');
    expect(await texts("#detail table tr:not(:first-child) td:first-child")).toEqual([
      "pp0tp0",
      "pp0tp1",
      "pp1tp0",
      "pp1tp1",
    ]);
    await page.click('button[data-stage="1"]');
    expect(await texts("#pieces tr:not(:first-child) td:nth-child(2)")).toEqual([
      "pp1tp0",
      "pp1tp1",
    ]);
  });

  test("escapes names from a peer", async () => {
    await open("hostile.html", renderHtml({ ...report, title: HOSTILE }, script));
    expect(await page.title()).toBe(HOSTILE);
    expect(await page.$$eval("img", (images) => images.length)).toBe(0);
    expect(await page.$eval("body", (body) => body.dataset["ready"])).toBe("true");
  });

  test("shows a page for a refusal", async () => {
    const other = await refused(`${llama} --tp 8 --tp 4 --layout LHBNC`);
    await open("refused.html", renderHtml(other, script));
    expect(await page.$eval("#text", (element) => element.textContent)).toContain(
      "decode with TP 8",
    );
  });

  test("makes no network request and logs no error", () => {
    expect(complaints).toEqual([]);
  });
});
