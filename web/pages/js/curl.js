// A request as a command for a POSIX shell.

/** Return a command that posts *json* to *url*; *streams*: the answer is shown as it comes. A key is not told. */
export function curl(url, json, { streams, withKey }) {
  return [
    `curl ${streams ? "-N " : ""}${quoted(url)}`,
    "-H 'Content-Type: application/json'",
    ...(withKey ? ['-H "Authorization: Bearer $MINISGL_API_KEY"'] : []),
    `-d ${quoted(json)}`,
  ].join(" \\\n  ");
}

const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;
