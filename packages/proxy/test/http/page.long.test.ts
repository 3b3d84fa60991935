// A long suite: the admin page in a browser.
import { existsSync } from "node:fs";
import { COMPLETION, STREAM, sendJson, sendStream } from "@kv/testing/http/fake-upstream";
import { startSideChannel } from "@kv/testing/http/side-channel";
import puppeteer, { type Browser, type Page } from "puppeteer-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { runPair, runProxy } from "../support/set-up.js";

const chromium = process.env.KV_CHROMIUM ?? "/usr/bin/chromium";
/** A folder for pictures of the page. */
const screenshots = process.env.KV_SCREENSHOTS;

/** The texts of the page whose contrast with the background is below 4.5 to 1 (WCAG 2.2, 1.4.3). */
const CONTRASTS = `(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (color) => {
    const [r, g, b] = rgb(color).map((part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const background = luminance(isDark ? "#121212" : "#ffffff");
  return [...document.querySelectorAll("h1, h2, p, th, td, i")].filter((one) => one.textContent.trim() !== "").flatMap((one) => {
    const text = luminance(getComputedStyle(one).color);
    const ratio = (Math.max(text, background) + 0.05) / (Math.min(text, background) + 0.05);
    return ratio < 4.5 ? [one.textContent + " " + ratio.toFixed(2)] : [];
  });
})()`;

/**
 * What the table of requests shows: the ticks, the share of the axis that fast requests take, and
 * ids.
 */
const REQUESTS = `({
  axis: Array.from(document.querySelectorAll("#axis i"), (tick) => tick.textContent),
  fast: Array.from(document.querySelectorAll('tr[data-request$="fast"] .bar'), (bar) =>
    Array.from(bar.children).reduce((sum, part) => sum + part.offsetWidth, 0) / bar.clientWidth),
  ids: Array.from(document.querySelectorAll('tr[data-request^="one-"]'), (tr) => tr.cells[1].textContent),
})`;
/** What stands before each value of an instance on a narrow screen. */
const LABELS = `Array.from(document.querySelector("#instances tbody tr").cells, (cell) => {
  cell.textContent ||= "1";
  return getComputedStyle(cell, "::before").content;
}).slice(3)`;
interface Shown {
  readonly axis: readonly string[];
  readonly fast: readonly number[];
  readonly ids: readonly string[];
}

describe.skipIf(!existsSync(chromium))(`the page in headless Chromium (${chromium})`, () => {
  let browser: Browser;
  beforeAll(async () => {
    browser = await puppeteer.launch({
      executablePath: chromium,
      args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
      timeout: 60_000,
    });
  });
  afterAll(() => browser?.close());

  /** Opens a page and closes it at the end, which has thrown and missed nothing. */
  async function withPage(address: string, use: (page: Page) => Promise<void>) {
    const page = await browser.newPage();
    page.setDefaultTimeout(60_000);
    const complaints: string[] = [];
    page.on("pageerror", (error) => complaints.push(String(error)));
    page.on("requestfailed", (request) => complaints.push(`${request.url()} failed`));
    try {
      await page.goto(address);
      await use(page);
      expect(complaints).toEqual([]);
    } finally {
      await page.close();
    }
  }

  /** Shows the page in a scheme at a width: nothing is cut off, and its texts have contrast. */
  async function show(page: Page, name: string, scheme: "light" | "dark", width: number) {
    await page.setViewport({ width, height: 900 });
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    expect(await page.evaluate("document.documentElement.scrollWidth")).toBeLessThanOrEqual(width);
    expect(await page.evaluate(CONTRASTS)).toEqual([]);
    const path = `${screenshots}/${name}-${scheme}-${width}.png`;
    if (screenshots !== undefined) await page.screenshot({ path, fullPage: true });
  }

  test("shows instances, their state, and requests as they end, with timelines", async () => {
    const { ask, d, adminUrl, proxy } = await runPair({}, { admin: { port: 0 } });
    await withPage(adminUrl, async (page) => {
      await page.waitForSelector("#connection[data-state=live]");
      await page.waitForSelector(`#instances tr[data-url="${d.url}"] .state[data-state=up]`);
      await ask({}, { headers: { "x-request-id": "first" } });
      await page.waitForSelector("#requests tr[data-request=first] .bar .prefill");
      await ask({ n: 0 }, { headers: { "x-request-id": "refused" } });
      await page.waitForSelector("#requests tr[data-request=refused] .failed");
      const rows = await page.$$eval("#requests tbody tr", (all) =>
        all.map((row) => [row.dataset.request, row.querySelectorAll(".bar span").length]),
      );
      expect(rows).toEqual([
        ["refused", 0],
        ["first", 2],
      ]);
      void proxy.instances.decode.drain(d);
      await page.waitForSelector(`#instances tr[data-url="${d.url}"] .state[data-state=draining]`);
    });
  });

  test("first-contact.md: running requests with P, D and time, on an axis with round ticks; a slow one does not squash the rest", async () => {
    const { p, d, ask, adminUrl } = await runPair(
      {
        d: async ({ json, response }) => {
          const { prompt } = json as { prompt: string };
          if (prompt !== "fast")
            await new Promise((resolve) =>
              setTimeout(resolve, prompt === "slow" ? 900 : 1e5).unref(),
            );
          if (!response.destroyed) sendJson(response, COMPLETION);
        },
      },
      { admin: { port: 0 } },
    );
    await withPage(adminUrl, async (page) => {
      await page.waitForSelector("#connection[data-state=live]");
      const leaves = new AbortController();
      const send = (prompt: string, id: string) =>
        ask({ prompt }, { headers: { "x-request-id": id }, signal: leaves.signal });
      for (const prompt of ["slow", ...Array.from({ length: 8 }, () => "fast")])
        await send(prompt, `one-client-with-long-ids-${prompt}`);
      const held = send("held", "held").catch(() => undefined);
      await page.waitForSelector("#requests tr[data-request=held] .bar.running .transfer");
      const servers = [p, d].map((each) => new URL(each.url).host).join(" → ");
      const row = await page.$$eval("#requests tr[data-request=held] td", (cells) =>
        cells.map((one) => one.textContent),
      );
      expect(row.slice(0, 4)).toEqual([
        expect.stringMatching(/^\d\d:\d\d:\d\d$/),
        "held",
        servers,
        "running",
      ]);
      for (const [width, scheme] of [
        [390, "dark"],
        [1280, "light"],
      ] as const) {
        await show(page, "requests", scheme, width);
        const found = (await page.evaluate(REQUESTS)) as Shown;
        expect(found.axis[0]).toBe("0 ms");
        expect(found.axis[1]).toMatch(/^(0\.0*)?[125]0*$/);
        expect(Math.max(...found.fast)).toBeGreaterThan(0.1);
        expect(new Set(found.ids).size).toBe(2);
        expect(await page.$$(".bar.cut")).not.toHaveLength(0);
      }
      leaves.abort();
      await held;
      await page.waitForSelector("#requests tr[data-request=held] .failed");
      expect(await page.$$(".bar.running")).toHaveLength(0);
    });
  });

  test("shows where the time went; an answer that is not streamed counts as its decode leg and not as transfer", async () => {
    const { ask, adminUrl } = await runPair(
      {
        d: ({ json, response }) => {
          if (json.stream === true) sendStream(response, STREAM);
          else sendJson(response, COMPLETION);
        },
      },
      { admin: { port: 0 }, disaggregateAbove: 8 },
    );
    await withPage(adminUrl, async (page) => {
      await page.waitForSelector("#connection[data-state=live]");
      const long = "a prompt of more than eight tokens, as its text has more than 32 characters";
      for (const body of [{ prompt: long }, { prompt: long, stream: true }, { prompt: "short" }])
        await (await ask(body)).text();
      await page.waitForFunction("document.getElementById('counted').textContent === '3'");
      const phases = await page.$$eval("#phases tbody tr", (rows) =>
        rows.map((row) => [row.dataset.phase, row.cells[1]?.textContent]),
      );
      expect(Object.fromEntries(phases)).toEqual({
        prefill: "2",
        "queue, transfer and first token": "1",
        decode: "1",
        "queue, transfer and decode, not streamed": "1",
        "prompt and decode at one instance, not streamed": "1",
      });
      for (const scheme of ["light", "dark"] as const)
        for (const width of [390, 1200]) {
          await show(page, "phases", scheme, width);
          // No table needs to be scrolled.
          const scrolled = await page.$$eval(".scroll", (all) =>
            all.map((one) => one.scrollWidth - one.clientWidth),
          );
          expect(scrolled).toEqual([0, 0, 0]);
        }
    });
  });

  test("shows the pairs of each instance, and the factor that keeps one from a pair; readable at 390 px", async () => {
    const sides = await Promise.all(
      ["0.33.0", "0.32.0"].map((vllmVersion) =>
        startSideChannel(() => ({ engineId: vllmVersion, vllmVersion })),
      ),
    );
    const kv = sides.map(({ port }) => ({ host: "127.0.0.1", port }));
    const { adminUrl } = await runProxy({
      prefillers: [
        { url: "http://127.0.0.1:1", kv: kv[0] },
        { url: "http://127.0.0.1:2", kv: kv[1] },
      ],
      decoders: [{ url: "http://127.0.0.1:3", kv: kv[0] }],
      pairing: { mode: "strict" },
      admin: { port: 0 },
    });
    await withPage(adminUrl, async (page) => {
      await page.waitForSelector("#instances td.misfit");
      const texts = await page.$$eval("#instances td.pairing, #instances td.misfit", (cells) =>
        cells.map((cell) => cell.textContent),
      );
      expect(texts).toEqual([
        "1",
        "0",
        "no pair: vllm_version is 0.32.0 at prefill and 0.33.0 at decode",
        "1",
      ]);
      for (const scheme of ["light", "dark"] as const) await show(page, "pairs", scheme, 390);
      const labels = await page.evaluate(LABELS);
      expect(labels).toEqual(
        ["in flight", "requests", "failures", "pairs", "cache", "turns", "last error"].map(
          (label) => `"${label} "`,
        ),
      );
    });
    for (const side of sides) await side.close();
  });

  test("with a token set, asks for it and shows nothing before", async () => {
    const token = "sixteen letters!";
    const { adminUrl } = await runProxy({
      prefillers: ["p:1"],
      decoders: ["d:1"],
      admin: { port: 0, token },
    });
    await withPage(adminUrl, async (page) => {
      await page.waitForSelector("#login:not([hidden])");
      expect(await page.$$("#instances tbody tr")).toHaveLength(0);
      await page.type("#token", token);
      await page.click("#login button");
      await page.waitForSelector("#connection[data-state=live]");
      await page.waitForSelector('#instances tr[data-url="http://p:1"]');
    });
  });
});
