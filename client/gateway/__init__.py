"""OpenAI's HTTP interface, and a page, in front of any running server: `foretoken gateway`.

`app` has the routes; `openai` the requests as OpenAI writes them; `upstream` the server behind; `answers` runs a request and ends it with its
client; `forms` writes chunks as OpenAI's objects; `entrance` is what every request passes first: its id and log line, key and size.
"""
