/** True in `npm run test:long -- --only whole`. `npm test` runs a short form of the suites that repeat or combine much. */
export const isLongRun = process.env["KV_LONG"] === "1";
